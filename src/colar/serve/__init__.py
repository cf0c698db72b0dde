"""`colar serve`: checkpoints behind the OpenAI API. Needs the extra `serve`.

app            paths, keys, streams and metrics, and uvicorn around them
chat_request   the body of a request, checked by pydantic, and errors
served_model   a checkpoint, and a request of the API as requests to its engine
chat_response  thoughts and text as they come, OpenAI's responses and events
ray_serve      replicas of it all on a Ray cluster
"""
