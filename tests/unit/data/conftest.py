import pytest

from motet.data.text import ChatTokenizer
from unit.data.samples import TEMPLATE, train_backend


@pytest.fixture(scope="session")
def backend() -> str:
    return train_backend()


@pytest.fixture(scope="session")
def tokenizer(backend: str) -> ChatTokenizer:
    return ChatTokenizer(backend, TEMPLATE, {"bos_token": "<bos>", "eos_token": "<eos>"})
