"""Answers from texts whose keys and values are computed once: a store, a report, and full prefill to compare with.

The model is tiny and random, so what it says means nothing; what is reused, and that ratio 1 is full prefill, does.
It needs the extra `retrieval`: `pip install '.[retrieval]'` in a checkout.
"""

import tempfile

import torch
from tokenizers import Tokenizer, decoders, models, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nearfield.retrieval import ChunkStore, Prompt, Reuse, verify

PASSAGES = [
    "The river Aare rises in the Bernese Alps and flows through Thun and Bern. " * 3,
    "Bern is the seat of the Swiss government; a bear is in its coat of arms. " * 3,
    "Thun lies where the river leaves the lake. " * 4,
]

letters = Tokenizer(models.BPE(unk_token="<unk>"))
letters.decoder = decoders.Fuse()
alphabet = [chr(code) for code in (10, *range(32, 127))]
letters.train_from_iterator(
    PASSAGES,
    trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>"], initial_alphabet=alphabet, show_progress=False
    ),
)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, bos_token="<s>", unk_token="<unk>")

torch.manual_seed(0)
torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
config = LlamaConfig(
    vocab_size=200,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
)
model = LlamaForCausalLM(config).eval()
print(verify(model))  # the gate: reuse means what it should on this model

with tempfile.TemporaryDirectory() as folder:
    reuse = Reuse(model, tokenizer, ChunkStore(folder), prompt=Prompt("<s>", "Question: ", "\nAnswer:"))
    ids = [reuse.add(text) for text in PASSAGES]
    options = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
    question = "Which river flows through Bern?"
    texts = {}
    for ratio in (0.0, 0.15, 1.0):
        answer = reuse.answer(question, ids, ratio, **options)
        texts[ratio] = answer.text
        print(f"\nratio {ratio:g}: {answer.text!r}\n{answer.report}")

    whole = reuse.answer(question, ids, selector="all", **options)
    assert texts[1.0] == whole.text  # everything computed again is full prefill
