"""What the suite `throughput` is written with: words, lines of documents, tasks. Slots in angle brackets, see Writer."""
# ruff: noqa: E501 - texts

from __future__ import annotations


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split("|"))


WORDS = {
    "person": _list(
        "Amara Lind|Tomas Okafor|Ines Varga|Jonas Petit|Leila Haddad|Marek Olsen|Priya Raman|Hugo Castell|Nadia Frey|Samuel Oyelaran|"
        "Greta Moss|Ivan Dragan|Yuki Tanabe|Clara Whitfield|Omar Said|Ruth Bellamy|Felix Arden|Mina Sorel|Daniel Kovacs|Elif Demir"
    ),
    "first": _list("Amara|Tomas|Ines|Jonas|Leila|Marek|Priya|Hugo|Nadia|Samuel|Greta|Ivan|Yuki|Clara|Omar|Ruth|Felix|Mina"),
    "city": _list("Lisbon|Bergen|Graz|Porto|Leeds|Turin|Gdansk|Lyon|Malmo|Ghent|Trieste|Cork|Basel|Tartu|Split|Bilbao"),
    "thing": _list(
        "oak cabinet|brass lamp|woollen blanket|garden bench|copper kettle|ceramic bowl|leather satchel|wall clock|reading chair|"
        "glass vase|bread knife|bicycle pump|canvas tent|music stand|rain barrel|tool box|picture frame|coffee grinder"
    ),
    "colour": _list("grey|dark green|white|pale blue|red|natural|black|yellow|brown|silver"),
    "state": _list("paid|shipped|open|returned|packed|delayed"),
    "service": _list("gateway|billing|search|scheduler|mailer|storage|sessions|catalogue|reports|audit"),
    "path": _list("/orders|/login|/items/<n>|/reports/daily|/search|/users/<big>|/invoices/<big>|/health|/upload|/cart"),
    "trouble": _list(
        "connection to the database was closed by the other side|certificate ends in <n> days|queue holds <big> jobs, the oldest <n> s|"
        "disk is <n> percent full|reply took <big> ms, more than allowed|password was wrong for the third time|"
        "could not read the template of the letter|worker <n> did not answer and was started again|lock was held for <n> s"
    ),
    "work": _list(
        "the restoration of the north window|the catalogue of the spring exhibition|the repair of the harbour crane|the new timetable|"
        "the survey of the old orchard|the training of the volunteers|the heating of the reading room|the loan of the two maps|"
        "the move of the archive|the school visits|the pump in the lower garden|the accounts of last year"
    ),
    "reason": _list(
        "because the delivery from <city> was late|since nobody had measured the door|although the budget is nearly spent|"
        "as the weather kept us indoors for <n> hours|because <first> had promised it in spring|while the insurance is still being settled|"
        "since the first attempt had failed|as we had agreed on the telephone|although <first> would rather have waited"
    ),
    "wish": _list(
        "send me the drawings before the end of the month|let me know which of the two dates suits you|return the signed copy to the office|"
        "tell <first> that the keys are with the porter|keep the receipts, as we can still claim the tax|"
        "check the figures on the second page once more|bring the old plans when you come to <city>"
    ),
    "feeling": _list(
        "I was glad to hear it|this is not what we had hoped for|it pleased everyone here|I must admit that it surprised me|"
        "we took it calmly|nobody is to blame for that"
    ),
    "sight": _list(
        "a heron stood in the shallow water|two boats lay upside down on the shingle|the hazel was full of long yellow catkins|"
        "fog hung over the lower meadow until noon|a fox had crossed the snow during the night|the swifts had come back to the tower|"
        "the path was covered with wet leaves|bees were busy in the ivy|ice had formed along the edge of the pond"
    ),
    "spot": _list(
        "below the weir|at the edge of the quarry|behind the chapel|on the long ridge|near the broken gate|by the salt marsh|"
        "under the railway bridge|at the second milestone|in the walled garden"
    ),
    "weather": _list(
        "light wind from the west|steady rain|clear and cold|warm, with high cloud|gusts after midday|still and grey"
    ),
    "problem": _list(
        "the parcel arrived with a broken lid|I was charged twice for the same order|the link in the letter does not open|"
        "my address is still the old one in <city>|the lamp flickers when it is warm|I cannot find the invoice of last month|"
        "the colour is not the one in the picture|the app asks me to log in every hour"
    ),
    "help": _list(
        "I have sent a new one today, and you may keep the first|the second payment goes back to your card within <n> days|"
        "please try the link that I have just sent|I have corrected that, and you will see it when you log in again|"
        "could you send me a photograph of the label|our workshop will call you tomorrow before noon|"
        "I will ask the warehouse and write to you again"
    ),
    "noun": _list("order|invoice|ticket|parcel|account|sensor|booking|member|reading|voucher|shipment|lesson"),
    "field": _list("price|weight|score|amount|length|rating|delay|volume|age|total"),
    "limit": _list("<n>|<big>|0.<n>"),
    "decision": _list(
        "it was agreed to ask for a second offer|the matter was put off to the next meeting|the proposal was accepted with <n> votes|"
        "<first> will write to the council|the cost must not be more than <big> euros|a small group will look into it until <date>|"
        "nothing will be changed before the summer"
    ),
}

DOCUMENTS = {
    "log": (
        "<time> INFO  <service>: GET <path> answered with 200 in <n> ms (request <hex>)",
        "<time> INFO  <service>: <n> jobs done, <n> waiting",
        "<time> WARN  <service>: <trouble>",
        "<time> ERROR <service>: <trouble> (request <hex>)",
        "<time> DEBUG <service>: session <hex> of user <big> renewed",
    ),
    "orders": ("<count>,<person>,<city>,<thing>,<n>,<price>,<state>",),
    "letters": (
        "Dear <first>, thank you for your letter about <work>. We had to begin later, <reason>, but <feeling>. Please <wish>.",
        "Yesterday I spoke with <person> about <work>. <person> would like to help, <reason>. Would you <wish>?",
        "As for the <thing> from <city>: it cost <n> euros, and <feeling>. I have put it aside for you, <reason>.",
        "My dear <first>, there is news of <work>. It will go on, <reason>. Until then I ask you to <wish>, and greet <person>.",
    ),
    "code": (
        'def <noun>_<field1>_<count>(rows):\n    found = [row["<field1>"] for row in rows if row["<field1>"] > <limit>]\n'
        "    return sum(found) / len(found) if found else 0.0\n",
        "def group_by_<field1>_<count>(rows):\n    groups = {}\n    for row in rows:\n"
        '        groups.setdefault(row["<field1>"], []).append(row["<noun>"])\n    return groups\n',
        "def check_<noun1>_<count>(<noun1>):\n    if <noun1>.<field1> < <limit1>:\n"
        '        raise ValueError("the <field1> must be at least <limit1>")\n    return <noun1>.<field1> - <limit1>\n',
        "class <first><count>:\n    def __init__(self, <noun1>, <field1>=<limit>):\n        self.<noun1> = <noun1>\n"
        "        self.<field1> = <field1>\n",
        "def <field1>_of_<noun1>_<count>(rows):\n    best = None\n    for row in rows:\n"
        '        if best is None or row["<field1>"] > best["<field1>"]:\n            best = row\n    return best["<noun1>"]\n',
    ),
    "minutes": (
        "Item <count>. <person> reported on <work>: it goes slower than planned, <reason>. After a short debate <decision>.",
        "Item <count>. On <work>, <person> asked for <big> euros, <reason>. <person> was against it. In the end <decision>.",
        "Item <count>. <person> proposed to leave <work> to <person> from <city>, <reason>; <decision>.",
    ),
    "stock": (
        '{"id": <count>, "item": "<thing>", "colour": "<colour>", "place": "<city>", "count": <n>, "price": <price>}',
        '{"id": <count>, "item": "<thing>", "colour": "<colour>", "place": "<city>", "count": <n>, "price": <price>, "since": "<date>"}',
    ),
    "notes": (
        "<date>. Weather: <weather>. Out with <first>: <spot> <sight>. Counted <n> birds <spot1>, and in the evening <sight>.",
        "<date>. I sat <spot> for an hour, <weather>. Then <sight>, and <first> said that it is early this year.",
        "<date>. A short day, <weather>. <first> stayed at home. Around noon <sight>; later, <spot>, <sight>.",
        "<date>. The map shows a spring <spot>, but I found none. <first1> had seen it <n> years ago. On the way back <sight>.",
    ),
    "chat": (
        "[<time>] <first1>: Hello, <problem>. My number is <big>.\n[<time>] Support: I am sorry to hear that, <first1>: <help>.",
        "[<time>] <first1>: There is one more thing: <problem>.\n[<time>] Support: No trouble at all, <help>.",
        "[<time>] <first1>: It is <first1> again, and still <problem>!\n[<time>] Support: That should not be, <help>.\n"
        "[<time>] <first1>: Thank you, I will wait for it in <city>.",
    ),
}

HEADINGS = {
    "log": "log of the server <hex> in <city>",
    "orders": "orders of the shop in <city>\nnumber,name,city,item,pieces,price,state",
    "letters": "letters between <person> and <person>",
    "code": "a module of helpers that <person> wrote",
    "minutes": "minutes of the society of <city>, chair <person>",
    "stock": "stock list of the warehouse in <city>, one record a line",
    "notes": "field notes of <person> from the country around <city>",
    "chat": "talks of the customer service in <city>",
}

TASKS = {
    "low_entropy": {
        "log": "Copy all lines above that hold WARN or ERROR, in their order and without any change. Write nothing else.",
        "orders": "Copy the orders above, each line as it is, sorted by number from the highest to the lowest. Write nothing else.",
        "letters": "Copy the letters above word for word, and put the number of each paragraph before it: 1, 2, 3 and so on.",
        "code": "Write the module above out again in one code block, with `rows` renamed to `records` everywhere, and nothing else changed.",
        "minutes": "Copy the items above word for word, the last one first and the first one last. Write nothing else.",
        "stock": "Extract `item` and `count` of all records above, in their order, one a line, written as `item: count`.",
        "notes": "Copy the notes above word for word as a list in Markdown, with the date of each note in bold.",
        "chat": "Copy all lines of Support above, in their order and without any change. Write nothing else.",
    },
    "mixed": {
        "log": "Explain to a new colleague what went wrong on this server. Quote the lines that show it, and say what to look at first.",
        "orders": "Write a report on these orders for the owner: what sells, from where people order, which orders need care, with examples.",
        "letters": "Summarise these letters in a table of who asks whom for what, then say in a paragraph what is still open.",
        "code": "Review this module: for each of the first ten functions say what it does, what may fail, and show a better version.",
        "minutes": "List the decisions of these minutes with who is to act, and write a short letter that tells the members of them.",
        "stock": "Describe what is in stock, by item and place, and propose what should be ordered or sold, quoting records.",
        "notes": "Summarise what was seen, by place and by time of the year, quote the best observations, and say what is missing.",
        "chat": "Describe the complaints by kind, quote one example of each, and write the answer that Support should give next time.",
    },
    "high_entropy": {
        "log": "Write a short story of the night on which this log was written, told by the one who had to get up. Invent freely.",
        "orders": "Choose one of these customers, and write a scene of a play in which the order arrives. Let the people surprise us.",
        "letters": "Invent what one of the two never dared to write, as a long and honest letter in another tone than those above.",
        "code": "Forget the details of the module. Write an essay on what programs have in common with gardens, with unusual examples.",
        "minutes": "Write a speech against the dullest item of these minutes, witty, full of images, and with a turn at the end.",
        "stock": "Choose three things of this list, and write the story of a family in which they are handed down for a hundred years.",
        "notes": "Write a poem without rhymes about a year in this country, and then a page on why the writer went out every day.",
        "chat": "Write a dialogue of two of these people who meet ten years later in a train, and talk of anything but their parcels.",
    },
}
