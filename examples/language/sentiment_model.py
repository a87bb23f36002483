"""A small BERT that tells whether a sentence is about an error: its tokenizer, and the training of both."""

from __future__ import annotations

from pathlib import Path

import torch
from corpus import is_bad_news
from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

VOCABULARY = 4000
LONGEST = 64
BATCH = 32


def make_tokenizer(texts: list[str], folder: Path) -> BertTokenizerFast:
    """Learn word pieces."""
    learner = BertWordPieceTokenizer(lowercase=True)
    learner.train_from_iterator(texts, vocab_size=VOCABULARY, show_progress=False)
    learner.save_model(str(folder))
    return BertTokenizerFast(vocab_file=str(folder / "vocab.txt"), do_lower_case=True, model_max_length=512)


def train(texts: list[str], folder: Path, epochs: int) -> float:
    """Train both and save them into the folder; return the share of correctly classified held-out sentences."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as for the language model
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(texts, folder)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=512,
        num_labels=2,
    )
    net = BertForSequenceClassification(config)
    labels = torch.tensor([0 if is_bad_news(text) else 1 for text in texts])
    encoded = tokenizer(texts, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    held_out = torch.arange(len(texts)) % 10 == 0
    chosen = (~held_out).nonzero().flatten()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net.train()
    for _ in range(epochs):
        for part in chosen[torch.randperm(len(chosen))].split(BATCH):
            loss = net(ids[part], attention_mask=mask[part], labels=labels[part]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    net.eval()
    with torch.no_grad():
        found = net(ids[held_out], attention_mask=mask[held_out]).logits.argmax(1)
    net.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return float((found == labels[held_out]).float().mean())
