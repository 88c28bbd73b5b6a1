"""A tiny random Qwen2 with a tokenizer of its own, written to a folder. Nothing is downloaded.

    python tests/e2e/tiny_model.py FOLDER

The same seed gives the same bytes of weights. Four layers, so that two pipeline stages of two chunks each get one
layer; untied embeddings, so that the last stage has an output layer of its own.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

TEXT = (
    "the quick brown fox jumps over the lazy dog while a training run and a rollout agree on every layer",
    "what is two plus three ? it is five . what is seven minus four ? it is three .",
    "a prompt is prefilled once , then each token is decoded ; the trainer sees both in one forward",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} {{ message['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


@dataclass(frozen=True)
class TinyModel:
    """Shape of the model; heads * head dim = hidden."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 128
    vocab: int = 128
    seed: int = 7


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Train a word-level tokenizer of at most `vocab` words on TEXT and write it the way transformers reads it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(TEXT, trainers.WordLevelTrainer(vocab_size=vocab, special_tokens=special))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<|im_end|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def write_model(folder: Path, shape: TinyModel = TinyModel()) -> Path:
    """Write config, weights (float32 safetensors) and tokenizer to `folder`, which is made; returns `folder`."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(shape.seed)
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=shape.vocab,
                hidden_size=shape.hidden,
                intermediate_size=shape.intermediate,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.kv_heads,
                max_position_embeddings=256,
                tie_word_embeddings=False,
                pad_token_id=0,
                eos_token_id=3,
                bos_token_id=2,
            )
        )
        for name, weight in model.named_parameters():
            # Norm weights of one would hide a wrongly assigned norm; a standard deviation of 0.02 would give all
            # tokens nearly the same output.
            if "norm" in name:
                torch.nn.init.uniform_(weight, 0.8, 1.2)
            elif weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.1)
            else:
                torch.nn.init.normal_(weight, std=0.02)
    model.save_pretrained(folder)
    write_tokenizer(folder, shape.vocab)
    return folder


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
