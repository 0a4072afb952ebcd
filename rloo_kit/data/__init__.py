"""Prompts: tasks, sources, chat templates. What needs the stack loads it inside its functions."""
