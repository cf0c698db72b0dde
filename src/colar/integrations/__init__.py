"""Adapters to other people's programs.

lm_eval       lm-evaluation-harness: a checkpoint as its model, our data sets as its tasks
ray_cluster   joining a Ray cluster, and GRPO's outputs from its actors
ray_answers   `colar generate` and `colar evaluate` on a cluster
"""
