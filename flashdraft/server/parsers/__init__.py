"""Parsers of answers: state machines over tokens and their text, which never see how tokens were cut into steps."""
