"""Methods, each a way to learn to think and to think: one file or folder and one line in `registry` each.

A row is one sequence of a batch: an example in training, a request while it thinks, a sampled output in reinforcement.
A thought is the embedding fed at one step between the separators: that of a token, or a latent, which is any other.
A group is the reasoning tokens that one latent stands for.

    Row, Batch     an example as token ids with its params; rows padded segment by segment
    ThinkState     rows before a step of thinking;  Thought: the step's result, an embedding to feed or the stop
    begun          columns of ThinkState, made once for each request by the method's `begin`
    conditions     facts by which Python branches in a step;  modes: those about draws (greedy, plain, nucleus)
    phase          a draw that shifts the starts of groups, for a c that is not whole
    unit           the element that c counts: a token, or in `grouping: equations` a number or a sign
    endings        records of groups that a draw ended: the token that would have continued it, or a class that ends it

base           the interface, and the rows that methods learn from;  thinking: a step of thinking and its reply
colar, sequential   the paper's method and ours, both built on `grouping`
cot, icot, coconut, distill, pause, tokenskip, ruplar, sim_cot   the others
unroll         sequences whose latents are made of hidden states: coconut, sim_cot and distill
losses         cross-entropy of rows
rollouts       log-probabilities of sampled outputs, for reinforcement
pretrained     saving and loading of a model with its method
"""
