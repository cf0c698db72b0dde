"""`colar serve`: checkpoints behind the OpenAI API. Needs the extra `serve`.

app            paths, keys, streams and metrics, and uvicorn around them
protocol       OpenAI's format: the body of a request, checked by pydantic, and errors;  response: the response to it
served_model   a checkpoint: a body as requests to its engine, thoughts and text as they come
ray_serve      replicas of the server on a Ray cluster
"""
