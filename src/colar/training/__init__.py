"""Training: one objective for all methods, runs that survive a kill.

sft            supervised fine-tuning: `train`;  grpo/ is reinforcement learning
config         length and speed of a run
rows           rows as functions of (seed, epoch, row id), and their order;  curriculum: the stages of iCoT and Coconut
objective      the loss of a batch, and a batch in parts;  trainer is transformers' Trainer around it
terms          means of the logged terms, and the first update that is not finite
resumable_run  the trainer in its folder: resume, publish;  run_folder has the files, callbacks the actions
preflight      the longest batch, before the first step
"""
