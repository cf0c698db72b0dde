"""Backbones, their checkpoints, and the language model with the modules of its method.

latent_lm        `LatentLM`: a causal LM that reads and writes embeddings
backbones, lora  a name -> model and tokenizer;  adapters
head             the LM head: logits of all tokens or some, a chunk of positions at a time
masks            our attention masks;  probes: checks that a backbone computes the same under them, and from embeddings
checkpoint       the files of a checkpoint;  weights: tensors in them and split between processes;  card: the model card
fused            norms and gated MLPs of fewer operations, for training;  quantized: linears of 8 and 4 bits
"""
