"""The model card of a draft: Markdown for a hub, out of the files that say what was made and what was measured."""
