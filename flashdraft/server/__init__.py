"""`flashdraft serve`: the OpenAI-compatible endpoint. Needs the packages of the extra `serve`."""
