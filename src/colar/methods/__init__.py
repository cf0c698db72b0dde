"""Ways of learning to think and of thinking: one file or folder a method, one line in `registry`.

A row is one sequence of a batch: an example in training, a request while it thinks, a sampled output in reinforcement.
A thought is what is fed at one step between the separators: the embedding of a token, or a latent, which is any other.
A group is the reasoning tokens that one latent stands for.

    Row, Batch     an example as token ids with its params; rows padded segment by segment
    MergedChains   the latents of a batch's chains and their group sizes, as training feeds them
    ThinkState     rows before a step of thinking;  Thought: the step's result, an embedding to feed or the stop
    begun          columns of ThinkState that the method's `begin` made once for each request
    conditions     facts by which Python branches in a step;  modes: those about draws (greedy, plain, nucleus)
    phase          a draw that shifts where groups begin, for a c that is not whole
    unit           what c counts: a token, or in `grouping: equations` a number or a sign
    endings        how draws ended groups: the token that would have continued one, or a class of tokens that end it

base           the interface, and the rows that are learnt from;  thinking: a step of thinking and its reply
colar, sequential   the paper's method and ours, over `grouping`
cot, icot, coconut, distill, pause, tokenskip, ruplar, sim_cot   the others
losses         cross-entropy of rows
rollouts       log-probabilities of sampled outputs, for reinforcement
pretrained     a model and its method: saved, loaded
"""
