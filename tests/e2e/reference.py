"""What transformers alone says: the reference that served answers are compared with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

MARGIN = 1e-3
"""Two best logits closer than this may change places: the sums have another order here."""
BRANCHES_MAX = 16


def words(reference: Reference, length: int, seed: int = 0) -> list[int]:
    """A prompt of so many tokens: whole characters, since a prompt that ends within one changes
    how the output reads."""
    dice = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz    ,."
    text = "".join(dice.choice(letters) for _ in range(4 * length))
    return reference.encode(text)[:length]


class Reference:
    """A model in one piece, run by `generate`."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        # Several threads on cores that the deployment uses too wait for each other all the time.
        torch.set_num_threads(1)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        eos = self._model.generation_config.eos_token_id
        self.eos = [eos] if isinstance(eos, int) else list(eos or [])
        # What the checkpoint says about sampling is not wanted, whoever merges it in.
        self._model.generation_config = GenerationConfig()
        self._known: dict[tuple[Any, ...], tuple[list[int], list[float], list[int]]] = {}

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The prompt of a conversation."""
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self.encode(text, add_special_tokens=False)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def greedy(
        self, prompt: Sequence[int], count: int, ignore_eos: bool = False
    ) -> tuple[list[int], list[float], list[int]]:
        """Output tokens; per token the margin of its logit over the second best, and which token
        that is."""
        key = (tuple(prompt), count, ignore_eos)
        if key not in self._known:
            self._known[key] = self._generate(prompt, count, ignore_eos)
        return self._known[key]

    def _generate(
        self, prompt: Sequence[int], count: int, ignore_eos: bool
    ) -> tuple[list[int], list[float], list[int]]:
        ids = torch.tensor([list(prompt)])
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=None if ignore_eos else self.eos,
            pad_token_id=self.eos[0],
            return_dict_in_generate=True,
            output_logits=True,
        )
        with torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config
            )
        tokens = output.sequences[0, len(prompt) :].tolist()
        best = torch.stack(output.logits)[:, 0].float().topk(2, dim=-1)
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        return tokens, margins, best.indices[:, 1].tolist()

    def assert_greedy(
        self,
        prompt: Sequence[int],
        text: str,
        completion_tokens: int,
        count: int,
        ignore_eos: bool = False,
    ) -> None:
        """`text`, of `completion_tokens` tokens, is the greedy answer of at most `count` tokens.

        Where the two best logits differ by less than `MARGIN`, the second is as good: the
        comparison then goes on along the served text, from that token on.
        """
        beginnings: list[list[int]] = [[]]
        seen = 0
        while beginnings:
            beginning = beginnings.pop()
            seen += 1
            assert seen <= BRANCHES_MAX, "too many near ties to compare anything"
            if beginning and (len(beginning) == count or self._ends(beginning, ignore_eos)):
                tokens, margins, seconds = beginning, [], []
            else:
                rest = count - len(beginning)
                more, margins, seconds = self.greedy([*prompt, *beginning], rest, ignore_eos)
                tokens = beginning + more
            if len(tokens) == completion_tokens and self.decode(tokens) == text:
                return
            for index, margin in enumerate(margins):
                position = len(beginning) + index
                if margin < MARGIN and self._fits(tokens[:position], text):
                    beginnings.append([*tokens[:position], seconds[index]])
        tokens, margins, _ = self.greedy(prompt, count, ignore_eos)
        raise AssertionError(
            f"not what the reference says\nserved ({completion_tokens} tokens): {text!r}\n"
            f"reference ({len(tokens)} tokens): {self.decode(tokens)!r}\n"
            f"least margin: {min(margins):.2e}"
        )

    def assert_likeliest(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Each token of `output` is the greedy one, given all those before it: the same as
        `assert_greedy`, for outputs that would take long to generate."""
        rows = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(output)[:, None])[:, 0]
        margins = (rows.max(dim=-1).values - chosen).tolist()
        wrong = [index for index, margin in enumerate(margins) if margin > MARGIN]
        assert not wrong, f"tokens {wrong[:8]} of {len(output)} are not what the reference says"

    def _ends(self, tokens: Sequence[int], ignore_eos: bool) -> bool:
        return not ignore_eos and tokens[-1] in self.eos

    def _fits(self, tokens: Sequence[int], text: str) -> bool:
        """The text may begin with these tokens; half a character at their end is no objection."""
        return text.startswith(self.decode(tokens).rstrip("\ufffd"))

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of what may follow each token: [len(tokens), vocabulary], float32."""
        return self.logits(tokens).log_softmax(dim=-1)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of what may follow each token: [len(tokens), vocabulary], float32."""
        with torch.inference_mode():
            found: torch.Tensor = self._model(torch.tensor([list(tokens)])).logits[0].float()
        return found

    def flips(self, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
        """Positions of `output` where the reference, given all before, prefers another token."""
        ids = torch.tensor([[*prompt, *output]])
        with torch.inference_mode():
            logits = self._model(ids).logits[0, len(prompt) - 1 : -1]
        best = logits.argmax(dim=-1).tolist()
        return [index for index, token in enumerate(output) if best[index] != token]
