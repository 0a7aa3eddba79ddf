"""Text to tokens: special ids, dialogue turns, documents that spell special tokens, shards.

Not tested here: how well the merges compress; the training record states it.
"""

import json
import lzma

import numpy as np
import pytest

from dspark.config.errors import DSparkError
from dspark.train.corpus import DOMAINS, Document, Turn, parse_document, read_documents, sample_texts
from dspark.train.shards import read_shard, shard_file, tokenizer_digest, write_shard
from dspark.train.tokenizer import SPECIAL_TOKENS, TOKEN_ID, load_tokenizer, train_tokenizer, write_tokenizer
from dspark.train.tokens import TokenArray, encode_documents, limit_tokens, load_split

TEXTS = [f"def add_{i}(a, b):\n    return a + b + {i * 37}\n" for i in range(60)] + ["It is a truth universally held."]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


def write_corpus(folder):
    for split in ("train", "heldout"):
        for domain in DOMAINS:
            text = "User: 1 + 1\nAssistant: 2" if domain in ("chat", "math") else f"{domain} text. " * 20
            with lzma.open(folder / f"{split}-{domain}.jsonl.xz", "wt") as out:
                for number in range(4):
                    out.write(json.dumps({"source": "s", "text": text + str(number)}) + "\n")


def test_special_tokens_have_the_ids_of_their_order(tokenizer):
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.get_vocab_size() == 300


def test_digits_stand_alone_and_text_survives(tokenizer):
    text = "x = 1234\n\té 漢 \x00"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("1234").tokens == ["1", "2", "3", "4"]


def test_files_of_the_official_layout_load_again(tokenizer, tmp_path):
    names = [path.name for path in write_tokenizer(tokenizer, tmp_path)]
    assert names == ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    assert tokenizer_digest(load_tokenizer(tmp_path)) == tokenizer_digest(tokenizer)
    assert "assistant" in json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]


@pytest.mark.parametrize("vocab_size", [0, 271, 40_000, 5000])
def test_impossible_vocabularies_are_refused(vocab_size):
    with pytest.raises(DSparkError, match="vocab_size"):
        train_tokenizer(TEXTS, vocab_size)


def test_foreign_or_missing_tokenizers_are_refused(tmp_path):
    with pytest.raises(DSparkError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DSparkError, match="not a readable"):
        load_tokenizer(tmp_path)


def test_dialogues_become_turns():
    chat = parse_document("chat", "chitchat", "Topic: Tea\nA: Hi\nA: there\nB: Yes.")
    assert chat.turns == (Turn("system", "Tea"), Turn("user", "Hi"), Turn("user", "there"), Turn("assistant", "Yes."))
    math = parse_document("math", "gsm", "User: 2 + 2?\nAssistant: It is 4.\n#### 4\n#### 4")
    assert math.turns == (Turn("user", "2 + 2?"), Turn("assistant", "It is 4.\n#### 4"))
    assert parse_document("code", "py", "A: int = 1").turns == (Turn(None, "A: int = 1"),)


def test_documents_are_framed_and_cannot_forge_special_tokens(tokenizer):
    documents = [
        Document("s", (Turn("user", "a"), Turn("assistant", "<|eos|>"))),
        Document("s", (Turn(None, "b <|user|>"),)),
    ]
    array = encode_documents(tokenizer, documents)
    ids = array.token_ids.tolist()
    first, second = ids[: array.starts[1]], ids[array.starts[1] :]
    assert first[:2] == [TOKEN_ID["<|bos|>"], TOKEN_ID["<|user|>"]]
    assert first[-2:] == [TOKEN_ID["<|end|>"], TOKEN_ID["<|eos|>"]]
    assert first.count(TOKEN_ID["<|eos|>"]) == 1
    assert [i for i in second if i < len(SPECIAL_TOKENS)] == [TOKEN_ID["<|bos|>"], TOKEN_ID["<|eos|>"]]
    assert array.num_bytes == len("a<|eos|>b <|user|>")


def test_corpus_reads_and_damage_is_named(tokenizer, tmp_path):
    write_corpus(tmp_path)
    arrays = load_split(tmp_path, tokenizer, "train", limit=2)
    assert {len(array.starts) for array in arrays.values()} == {2}
    assert list(sample_texts(tmp_path, 50, seed=1)) == list(sample_texts(tmp_path, 50, seed=1))
    (tmp_path / "train-code.jsonl.xz").write_bytes(b"junk")
    with pytest.raises(DSparkError, match="damaged"):
        list(read_documents(tmp_path, "train", "code"))
    with pytest.raises(DSparkError, match="missing"):
        list(read_documents(tmp_path / "nowhere", "train", "code"))


def test_shards_return_what_was_written_and_refuse_another_tokenizer(tokenizer, tmp_path):
    array = encode_documents(tokenizer, [Document("s", (Turn(None, "hello"),)), Document("s", (Turn(None, "x"),))])
    path = shard_file(tmp_path / "shards", "train", "code")
    write_shard(path, array, tokenizer_digest(tokenizer))
    again = read_shard(path, tokenizer_digest(tokenizer))
    assert np.array_equal(again.token_ids, array.token_ids)
    assert np.array_equal(again.starts, array.starts)
    assert again.num_bytes == array.num_bytes
    with pytest.raises(DSparkError, match="made with"):
        read_shard(path, "0" * 64)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DSparkError, match="damaged"):
        read_shard(path, tokenizer_digest(tokenizer))
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_token_limit_keeps_whole_documents():
    array = TokenArray(np.arange(100, dtype=np.int16), np.arange(0, 100, 10), 300)
    kept = limit_tokens(array, 35, seed=3)
    assert kept.num_tokens == 30
    assert kept.num_bytes == 90
    assert all(kept.token_ids[i] % 10 == 0 and kept.token_ids[i + 9] % 10 == 9 for i in kept.starts)
    assert limit_tokens(array, 100) is array
