"""The HTTP server: OpenAI's, Anthropic's, Ollama's and vLLM's endpoints, and the status page.

Rule: endpoints run on the event loop, text work on one text thread, and the engine on its own
thread; nothing here touches an array.
"""
