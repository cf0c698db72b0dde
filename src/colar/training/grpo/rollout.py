"""A rollout: G outputs for each question, sampled through the engine, with all draws and their settings.

The outputs of a question follow one another in the engine's queue, so that the question is prefilled once for all.
Every draw is a function of (run seed, generation, example id, sample): a resumed run samples the same, and no output
depends on the others of its batch. The model samples in eval mode, without gradients.

    Output      one sampled output as Python values: the engine's completion, with its question
    Rollouts    many outputs as tensors (`methods/rollouts.py`): what the trainer scores
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from colar.data.example import Example
from colar.engine import graphs
from colar.engine.completion import Completion
from colar.engine.engine import Engine
from colar.engine.request import Request, prompt_ids
from colar.methods import registry
from colar.methods.base import Method
from colar.methods.rollouts import Rollouts, Scorable
from colar.methods.thinking import param_columns
from colar.model.latent_lm import LatentLM
from colar.ops.noise import seed_from
from colar.ops.ragged import pad
from colar.training.grpo.config import GrpoConfig


@dataclass(frozen=True)
class Output:
    """One output and its question."""

    example: Example
    question_ids: list[int]
    completion: Completion
    eos_id: int

    @property
    def stop_chosen(self) -> bool:
        """True if the method chose to end the thinking; False for thinking of a fixed length, or cut at the limit."""
        # At the limit the separator follows in any case, so that the choice has no effect.
        completion = self.completion
        chose = completion.stopped and bool(completion.info)
        return chose and completion.length < completion.request.decoding.max_latents

    @property
    def sampled_ids(self) -> list[int]:
        """The answer's tokens, EOS included if it was sampled."""
        if self.completion.reason == "stop":
            return [*self.completion.token_ids, self.eos_id]
        return list(self.completion.token_ids)

    def logps(self, method: Scorable) -> Tensor:
        """The engine's log-prob of each position, (K + 1 + A,): thoughts, the stop (0 if forced), tokens."""
        completion = self.completion
        thinking = torch.zeros(completion.length + 1)
        # One for each decision of the thinking: K thoughts, and the stop where it was chosen.
        n = completion.length + self.stop_chosen
        columns = {name: column[:n] for name, column in completion.info.items()}
        if n and columns:
            thinking[:n] = method.sampled_logps(columns, torch.arange(n) == completion.length)
        # Answer tokens have their log-probs from the engine, EOS included.
        return torch.cat([thinking, torch.tensor(completion.token_logps)])


def requests(
    method: Method, config: GrpoConfig, examples: Sequence[Example], seed: int, generation: int
) -> list[Request]:
    """G requests per question, question by question. The outputs of a question share a drawn factor and threshold."""
    queue = []
    for example in examples:
        # One seed for each question: the sample's number distinguishes the draws of its outputs.
        question_seed = seed_from(seed, "rollout", generation, example.id)
        values = {}
        for name, choices in config.param_choices.items():
            # Each value has its own draw. The factor's is still named as it first was, so that older runs' draws stay.
            which = "factor" if name == "compression_factor" else name
            values[name] = Random(seed_from(question_seed, which)).choice(choices)
        params = registry.make_params(method, values)
        for sample in range(config.num_generations):
            request = Request.of(
                example, params, config.decoding, question_seed, sample=sample, keep_latents=True
            )
            queue.append(request)
    return queue


def roll_out(
    lm: LatentLM,
    method: Method,
    config: GrpoConfig,
    examples: Sequence[Example],
    seed: int,
    generation: int,
) -> list[Output]:
    """The outputs of these questions, G each, question by question."""
    queue = requests(method, config, examples, seed, generation)
    merged = lm.merged() if config.merge_adapter else contextlib.nullcontext()
    with lm.evaluating(), merged:
        # A fresh engine: earlier requests may determine the shape of its cache, and so the last bit of a sum.
        completions = Engine(lm, method, max_batch=config.max_batch).generate(queue)
    graphs.leave_room(lm)
    outputs = []
    for i, completion in enumerate(completions):
        example = examples[i // config.num_generations]
        question_ids = prompt_ids(lm, method, completion.request)
        # On the CPU, so that they can be sent to other processes. Tokens, in groups too, are embedded again when they
        # are scored, so their embeddings are not kept.
        latents = completion.latents
        if latents is not None:
            of_tokens = "group_ids" in completion.info or completion.thought_ids[0] >= 0
            latents = latents[:, : 0 if of_tokens else None].cpu()
        # Vectors of the model's width are only shown in pages, and would be most of what processes send each other.
        numbers = {
            name: column for name, column in completion.info.items() if column.shape[1:] != (lm.width,)
        }
        info = {name: column.cpu() for name, column in numbers.items()}
        completion = replace(completion, latents=latents, info=info)
        outputs.append(Output(example, question_ids, completion, lm.template.eos_id))
    return outputs


def collate(outputs: Sequence[Output], width: int) -> Rollouts:
    """Outputs as tensors on the CPU; `width` is the model's. ValueError for outputs that cannot be scored."""
    question_ids, question_lengths = pad([output.question_ids for output in outputs])
    thought_ids, thought_counts = pad([output.completion.thought_ids for output in outputs])
    token_ids, token_lengths = pad([output.sampled_ids for output in outputs])
    latents = [output.completion.latents for output in outputs]
    group_ids = [output.completion.info.get("group_ids") for output in outputs]
    endings = [output.completion.info.get("endings") for output in outputs]
    sent = [output.completion.request for output in outputs]
    # Scores are log-probs of the whole softmax. For a draw from a nucleus they would be too low, and a token outside
    # the current weights' nucleus would have none.
    if any(request.decoding.top_p < 1 for request in sent):
        raise ValueError("top_p must be 1 in outputs that are scored")
    temperatures = [request.decoding.temperature for request in sent]
    latent_temperatures = [request.decoding.latent_temperature for request in sent]
    return Rollouts(
        question_ids=question_ids,
        question_lengths=question_lengths,
        thought_ids=thought_ids,
        latents=_padded(latents, thought_counts, torch.zeros(0, width), 0),
        group_ids=_padded(group_ids, thought_counts, torch.zeros(0, 0, dtype=torch.int64), -1),
        endings=_padded(endings, thought_counts, torch.zeros(0, dtype=torch.int64), -1),
        thought_counts=thought_counts,
        token_ids=token_ids,
        token_lengths=token_lengths,
        stopped=torch.tensor([output.stop_chosen for output in outputs]),
        temperature=torch.tensor(temperatures, dtype=torch.float64),
        latent_temperature=torch.tensor(latent_temperatures, dtype=torch.float64),
        params=param_columns([request.params for request in sent]),
    )


def engine_logps(method: Scorable, outputs: Sequence[Output], rollouts: Rollouts) -> Tensor:
    """The engine's log-probs where `Scores.logps` has the trainer's, (R, N); 0 at forced stops."""
    return _padded(
        [output.logps(method) for output in outputs], rollouts.action_positions(), torch.zeros(0), 0
    )


def _padded(columns: Sequence[Tensor | None], counts_R: Tensor, empty: Tensor, fill: int) -> Tensor:
    """Columns of the outputs, each cut to its count and padded with `fill`, as one tensor (R, longest, ...).

    `empty` (0, ...) gives the shape and dtype if no output has a column.
    """
    # All thoughts of a method have the same shape: a group's places are those of its largest factor.
    like = next((column for column in columns if column is not None), empty)
    padded_RK = torch.full((len(columns), int(counts_R.max()), *like.shape[1:]), fill, dtype=like.dtype)
    for row, (column, count) in enumerate(zip(columns, counts_R.tolist(), strict=True)):
        if column is not None:
            padded_RK[row, :count] = column[:count]
    return padded_RK
