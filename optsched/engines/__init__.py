"""Real engines: policies of optsched inside vLLM, requests replayed, profiles measured."""
