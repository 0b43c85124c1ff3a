"""Models for other programs: folders that transformers, vLLM, llama.cpp and ollama open."""
