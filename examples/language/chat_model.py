"""A small GPT over words: the network and its training."""

from __future__ import annotations

import random

import torch
from corpus import CLS, PAD, SEP, SPEAKER1, SPEAKER2, UNKNOWN, VOCABULARY, Words
from torch import nn

WIDTH = 96
HEADS = 4
LAYERS = 2
LONGEST = 256
BATCH = 16


class Block(nn.Module):
    """Attention to earlier places, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dense = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            self.project(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).unbind(2)
        )
        attended = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.dense(self.norm2(x))


class Chat(nn.Module):
    """Scores of every word as the next one: three (n, length) tensors of int64 to (n, VOCABULARY)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LONGEST, WIDTH)
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        # Keeps numbers that are no word from being chosen.
        self.register_buffer("bias", torch.full((VOCABULARY,), -100.0))
        self.longest = LONGEST
        self.first_speaker = SPEAKER1

    def states(self, ids: torch.Tensor, present: torch.Tensor, speakers: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        said_by = self.words(speakers) * (speakers >= self.first_speaker).unsqueeze(-1)
        x = self.words(ids) + said_by + self.places(torch.arange(length, device=ids.device))
        before = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        # A place always sees itself, so padding has something to attend to.
        itself = torch.eye(length, dtype=torch.bool, device=ids.device)
        mask = (before & (present > 0).unsqueeze(1) | itself).unsqueeze(1)
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)

    def forward(self, ids: torch.Tensor, present: torch.Tensor, speakers: torch.Tensor) -> torch.Tensor:
        ids, present, speakers = ids[:, -self.longest :], present[:, -self.longest :], speakers[:, -self.longest :]
        last = present.sum(1) - 1
        state = self.states(ids, present, speakers)
        return state[torch.arange(len(last), device=ids.device), last] @ self.words.weight.T + self.bias


def dialogues(answers: dict[str, str], words: Words) -> list[tuple[list[int], list[int]]]:
    """Each question with its answer: the numbers, and the speakers."""
    out = []
    for question, answer in answers.items():
        first, second = words.encode(question), words.encode(answer)
        ids = [CLS, SPEAKER1, *first, SPEAKER2, *second, SEP]
        speakers = [SPEAKER1] * (2 + len(first)) + [SPEAKER2] * (2 + len(second))
        out.append((ids, speakers))
    return out


def train(answers: dict[str, str], words: Words, steps: int) -> tuple[Chat, float]:
    """Train a network; also the loss of its last tenth."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is small: more threads wait for each other, for minutes on a busy machine
    chooser = random.Random(0)
    net = Chat()
    known = len(words.words) + UNKNOWN + 1
    net.bias[:known] = 0
    examples = dialogues(answers, words)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        chosen = chooser.sample(examples, BATCH)
        length = max(len(ids) for ids, _ in chosen)
        ids = torch.tensor([ids + [PAD] * (length - len(ids)) for ids, _ in chosen])
        speakers = torch.tensor([who + [PAD] * (length - len(who)) for _, who in chosen])
        # The network learns to answer: the words of the second speaker, and when to end.
        answer = (speakers[:, :-1] == SPEAKER2) & (ids[:, 1:] != PAD)
        states = net.states(ids, ids != PAD, speakers)[:, :-1][answer]
        loss = nn.functional.cross_entropy(states @ net.words.weight[:known].T, ids[:, 1:][answer])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    recent = losses[-max(1, steps // 10) :]
    return net.eval(), sum(recent) / len(recent)
