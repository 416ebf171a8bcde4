"use strict";
// Chat with the model: plain DOM, text only ever set as text, so that no answer can become markup.

const $ = (id) => document.getElementById(id);
let messages = [];
let running = [];

function element(parent, tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function headers() {
  const found = { "Content-Type": "application/json" };
  if ($("key").value) found.Authorization = `Bearer ${$("key").value}`;
  return found;
}

async function loadModel() {
  try {
    const reply = await fetch("v1/models", { headers: headers() });
    const body = await reply.json();
    $("model").textContent = reply.ok ? body.data[0].id : body.error.message;
    if (reply.status === 503) setTimeout(loadModel, 1000);
  } catch (error) {
    $("model").textContent = "the server does not answer";
  }
}

async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

// One answer in its own box: tokens coloured by who chose them, thinking folded, numbers below.
async function answer(parent, speculate, controller) {
  const box = element(parent, "section", "answer");
  const thinking = element(box, "details");
  element(thinking, "summary", "", "thinking");
  thinking.hidden = true;
  const thought = element(thinking, "div", "thought");
  const content = element(box, "div", "content");
  const numbers = element(box, "div", "numbers");
  const body = {
    messages,
    stream: true,
    max_tokens: Number($("max").value),
    temperature: Number($("temperature").value),
    stream_options: { include_usage: true, continuous_usage_stats: true },
    speculation: { enabled: speculate, report: true },
    chat_template_kwargs: { enable_thinking: $("thinking").checked },
  };
  let text = "";
  let first = null;
  let tokens = 0;
  const say = (suffix) => {
    const seconds = first === null ? 0 : (performance.now() - first) / 1000;
    const rate = seconds > 0 && tokens > 1 ? ((tokens - 1) / seconds).toFixed(1) : "-";
    numbers.textContent = `${speculate ? "with" : "without"} speculation: ${tokens} tokens, ${rate} tokens/s${suffix}`;
  };
  try {
    const reply = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal: controller.signal,
    });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    for await (const event of events(reply)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) tokens = event.usage.completion_tokens;
      for (const choice of event.choices) {
        if (first === null && (choice.delta.content || choice.delta.reasoning)) first = performance.now();
        if (choice.delta.reasoning) {
          thinking.hidden = false;
          thought.append(choice.delta.reasoning);
        }
        if (choice.delta.content) {
          text += choice.delta.content;
          show(content, choice);
        }
      }
      const own = event.metrics && event.metrics.speculative_decoding;
      say(own ? acceptance(own) : "");
    }
  } catch (error) {
    if (error.name !== "AbortError") element(box, "div", "error", error.message);
  }
  $("talk").scrollTop = $("talk").scrollHeight;
  box.dataset.done = "true";
  return text;
}

// Colour a delta's tokens where their texts make up the delta; otherwise (markers, trimmed text) show it plain.
function show(content, choice) {
  const sources = choice.speculation || [];
  if (sources.map(([piece]) => piece).join("") === choice.delta.content) {
    for (const [piece, accepted] of sources) element(content, "span", accepted ? "accepted" : "own", piece);
  } else {
    element(content, "span", "", choice.delta.content);
  }
}

function acceptance(own) {
  if (own.mean_acceptance_length === null) return "";
  const steps = own.num_spec_steps;
  const shares = own.acceptance_histogram.map((_, i) => own.acceptance_histogram.slice(i).reduce((a, b) => a + b, 0) / steps);
  const positions = shares.slice(1).map((share) => share.toFixed(2)).join(" ");
  return `, AL ${own.mean_acceptance_length.toFixed(2)}, accepted by position ${positions}`;
}

async function send(event) {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running.length) return;
  $("text").value = "";
  messages.push({ role: "user", content: text });
  element($("talk"), "div", "user", text);
  const row = element($("talk"), "div", "answers");
  const modes = $("both").checked ? [true, false] : [$("speculation").checked];
  running = modes.map(() => new AbortController());
  $("stop").hidden = false;
  const texts = await Promise.all(modes.map((mode, i) => answer(row, mode, running[i])));
  running = [];
  $("stop").hidden = true;
  if (texts.length === 2) {
    row.dataset.same = String(texts[0] === texts[1]);
    element($("talk"), "div", "numbers", texts[0] === texts[1] ? "both texts are the same" : "the texts differ");
    $("talk").scrollTop = $("talk").scrollHeight;
  }
  messages.push({ role: "assistant", content: texts[0] });
}

$("form").addEventListener("submit", send);
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running.forEach((controller) => controller.abort()));
$("key").addEventListener("change", loadModel);
$("reset").addEventListener("click", () => {
  messages = [];
  $("talk").replaceChildren();
});
loadModel();
