"""Text in front of the engine: prompts become token ids, token ids become text."""
