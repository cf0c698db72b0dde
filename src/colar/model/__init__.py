"""Backbones, their checkpoints, and the language model with the modules of its method.

A row is one sequence of a batch; a token has weights in the embedding and in the LM head.

latent_lm      `LatentLM`: a causal LM that reads and writes embeddings
backbones      a name -> model and tokenizer
lora, sharded  adapters; weights split between processes
checkpoint     the files of a checkpoint;  weights writes and reads tensors, card the model card
masks, probes  attention masks; does a backbone compute with them, and from embeddings, what it computes by itself
vocabulary, chunks   embeddings and LM head; logits some positions at a time
fused          norms and gated MLPs of fewer operations, for training;  quantized: linears of 8 and 4 bits
"""
