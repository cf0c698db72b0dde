"""Requests in, completions out. Read `reference` first: it is the same in a hundred lines, without cache or batch.

request        Request, Decoding, the token ids of a prompt
completion     events, the completions made of them, and their tokens as text
engine         the loop: decode, schedule, prefill, choose;  async_engine runs it in a thread, for servers
scheduler      which requests are next, within slots and a budget of positions, and how far each one is
running        the requests that think or answer as columns, and the choice of what they feed next
runner         forward passes into the cache;  graphs records steps as CUDA graphs
cache          keys and values in slots
"""
