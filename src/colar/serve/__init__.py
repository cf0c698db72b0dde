"""`colar serve`: checkpoints behind the OpenAI API. Needs the extra `serve`.

server         socket, logs, signals;  app has paths, keys and streams
schema         requests, checked by pydantic;  conversation has their texts
served         a request of the API as requests of the engine
answer         thoughts and text as they come;  thought_text reads a thought
formats        OpenAI's responses and events;  errors, metrics
"""
