"""Prompts: tasks, sources, chat templates. Functions that need the stack import it themselves."""
