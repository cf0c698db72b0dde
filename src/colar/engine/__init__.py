"""Requests in, completions out. Read `reference` first: the same loop in a hundred lines, without cache or batch.

request        Request, Decoding, the token ids of a prompt
completion     events, the completions made of them, and their tokens as text
engine         the loop: decode, schedule, prefill, choose;  async_engine runs it in a thread, for servers
scheduler      the requests that start next, within slots and a budget of positions; each one's progress
running        the requests that think or answer as columns, and the choice of their next inputs
runner         forward passes into the cache;  graphs records steps as CUDA graphs
cache          keys and values in slots
"""
