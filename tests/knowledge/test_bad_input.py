"""Bad arguments and what is said of them: one table, without the checker of types that the other tests run under."""

import math

import pytest
import torch
from jaxtyping import config as checker

import attnflow as af
from attnflow.knowledge.retrieval import Certificate
from tests.knowledge.test_trace import made
from tests.models import tiny

SIZES = {"vocab_size": 32, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "num_entries": 3}
knowledge = af.knowledge


@pytest.fixture(autouse=True)
def no_type_checker():
    """Users have none: without it our own checks see what comes."""
    before = checker.jaxtyping_disable
    checker.update("jaxtyping_disable", True)
    yield
    checker.update("jaxtyping_disable", before)


@pytest.fixture
def store():
    with knowledge.Store.open("memory", dim=4) as made:
        made.insert(embeddings=torch.eye(4))
        yield made


def config(**given):
    return knowledge.ModularConfig(**{**SIZES, **given})


def model():
    return knowledge.ModularForCausalLM(config())


def plain(*sizes, **given):
    return knowledge.GeneralizedCrossAttention(*sizes, **given)


def layer(*given, **more):
    return plain(8, 4, 6)(*given, **more)


def entry(*given, **more):
    return knowledge.entry(made("Llama"), *given, **more)


def shared(*given, **more):
    return knowledge.entry(made("relu"), *given, **more)


def bound(*given):
    return Certificate(False, 1, 2, torch.tensor([1.0]), torch.tensor([1])).error_bound(*given)


def converted(name="Llama", **options):
    return knowledge.from_ffn(tiny(name, torch.float32), **options)


VALUES = [
    (lambda s: s.search(torch.eye(4), 1, mode="fast"), 'mode must be "exact", "approximate" or None, got \'fast\''),
    (lambda s: s.snapshot(3), "a snapshot's name has 1 to 64 letters, digits, '.', '_' or '-', got 3"),
    (lambda _: knowledge.Retrieval(threshold="0"), "threshold must be a number, not NaN, got '0'"),
    (lambda _: knowledge.trace(model(), [1, 2], by="size"), "by must be 'effect', 'direct' or 'norm', got 'size'"),
    (lambda _: knowledge.trace(model(), [1, 99]), "token ids must lie in 0 to 31, the model's vocabulary, got up to"),
    (lambda s: s.get([0, -1]), "ids must hold integers from 0 to 2**63 - 1, got -1: a search pads ids"),
    (lambda _: plain(8, 4, 6, threshold="none"), "threshold must be one of 'mlp', 'coordinate', 'constant', got"),
    (lambda _: plain(8, 4, 6, activation="tanh"), "activation must be one of 'relu', 'gelu', 'silu', 'sparsemax' or a"),
    (lambda _: plain(8, 4, 1, gated=True, threshold="coordinate"), "needs an entry_dim of at least 2"),
    (lambda _: plain(0, 4, 6), "model_dim must be at least 1, got 0"),
    (lambda _: layer(torch.zeros(2, 7), torch.zeros(5, 6)), "hidden must have width 8, got shape (2, 7)"),
    (lambda _: layer(torch.zeros(2, 8), torch.zeros(5, 7)), "entries must be [entries, 6], got shape (5, 7)"),
    (lambda _: layer(torch.zeros(2, 8), torch.zeros(5, 6), order="fast"), "order must be one of 'query_side',"),
    (lambda _: knowledge.Retrieval(), "pass either k or threshold, got k=None, threshold=None"),
    (lambda _: knowledge.Retrieval(k=0), "k must be at least 1, got 0"),
    (lambda _: knowledge.Retrieval(k=1, search="fast"), "search must be one of 'auto', 'dense', 'exact',"),
    (lambda _: knowledge.Retrieval(threshold=0, search="approximate"), "an approximate search finds the k best: pass"),
    (lambda _: knowledge.KnowledgeBase(0, 4), "num_entries must be at least 1, got 0"),
    (lambda _: config(num_attention_heads=4, num_key_value_heads=3), "num_attention_heads (4) must be a multiple of"),
    (lambda _: config(head_dim=3), "head_dim must be even, as RoPE rotates pairs of coordinates, got 3"),
    (lambda _: config(threshold="constant"), "threshold must be one of 'mlp', 'coordinate', got 'constant'"),
    (lambda _: knowledge.edit(model(), {"prompt": "a"}), "edit needs the model's tokenizer: pass what af.load_model"),
    (
        lambda _: knowledge.trace(model(), [1, 2], answer=[1]),
        "expected one answer, or one for each of the 2 positions,",
    ),
    (lambda _: knowledge.trace(model(), [1, 2], position=2), "position must be from -2 to 1 for 2 tokens, got [2]"),
    (lambda _: knowledge.to_ffn(model()), "ModularForCausalLM reads no knowledge base: convert it"),
    (lambda _: knowledge.to_ffn(tiny("Llama")), "LlamaForCausalLM reads no knowledge base: convert it"),
    (lambda _: knowledge.from_ffn(converted()), "LlamaForCausalLM reads a knowledge base already"),
    (
        lambda _: converted("GPT2", entry_dim=32),
        "not exact with these weights: [W_1^T | W_2] has rank 64, but entries have width d_E = 32",
    ),
    *(
        (
            lambda _, name=name, given=given: converted(name, **given),
            f"first gated layer is not exact with these weights: {message}",
        )
        for name in ("Llama", "Phi3")  # separate maps, and one for both keys
        for given, message in (
            ({"entry_dim": 32}, "[W_gate^T | W_up^T | W_2] has rank"),
            ({"key_dim": 3}, "[W_gate | W_up] has rank 32, but keys have width d_k = 3"),
        )
    ),
    (lambda _: knowledge.attach(model(), knowledge.Store.open("memory", dim=8)), "width 4, but the store has width 8"),
    (
        lambda s: knowledge.attach(knowledge.ModularForCausalLM(config(num_hidden_layers=2)), s),
        "need 2 threshold columns, but the store has 0: create it with Store.open(uri, dim=4, num_thresholds=2)",
    ),
    *(
        (lambda _, least=least: knowledge.duplicates(torch.eye(2), least), f"a cosine in (0, 1], got {least}")
        for least in (0.0, 1.5, math.nan)
    ),
    (lambda _: knowledge.duplicates(torch.tensor([[math.nan, 1.0]])), "entries must be a matrix of finite numbers"),
    (lambda _: entry(999), "no entry 999: the 96 ids go from 0 to 95"),
    (lambda _: entry(7, layer=1), "entry 7 belongs to layer 0, got layer=1"),
    (lambda _: entry(7, head=1), "head must be"),
    (lambda _: entry(7, texts="a text"), "put it in a list"),
    (lambda _: entry(7, texts=["a text"]), "needs a tokenizer"),
    (lambda _: entry(7, count=0), "count must be"),
    (lambda _: entry(7, ablate=[5, 6], position=2), "position must be"),
    (lambda _: shared(3), "layers [0, 1] all read entry 3: pass layer="),
    (lambda _: shared(99, layer=1), "no entry 99: layer 1 reads 40 entries"),
    (lambda _: shared(3, layer=2), "layer must be one of [0, 1]"),
    *(
        (lambda _, name=name: bound(1.0, name), "for others the k-th score gives no bound")
        for name in ("sparsemax", "tanh")
    ),
    *((lambda _, norm=norm: bound(norm), "value_norm must be the largest norm") for norm in (-1.0, math.nan, math.inf)),
]
TYPES = [
    (lambda s: s.range(torch.eye(4), "0.5"), "threshold must be a number, got '0.5' of type str"),
    (lambda s: s.insert(embeddings=torch.eye(4), texts=(text for text in "abcd")), "texts must be a sequence of 4"),
    (lambda _: knowledge.from_ffn("gpt2"), "got str; load a model by its name or folder with af.load_model"),
    (lambda _: knowledge.trace("gpt2", [1, 2]), "got str; load a model by its name or folder with af.load_model"),
    (lambda _: knowledge.attach(model(), "folder"), "open store, af.knowledge.Store.open(uri), got str"),
    (lambda _: model()(torch.tensor([[1, 2]]), entries=[[1.0] * 4]), "entries must be a tensor [entries, d_E] or a"),
]

UNSUPPORTED = [
    (
        lambda _: converted("Mamba2"),
        "no feed-forward layers that are known (modules that may be: none), and nothing was",
    ),
    (lambda _: knowledge.entry(converted("T5"), 3), "has two"),
]
KINDS = ((ValueError, VALUES), (TypeError, TYPES), (af.UnsupportedArchitecture, UNSUPPORTED))


@pytest.mark.parametrize(("kind", "call", "message"), [(kind, *row) for kind, rows in KINDS for row in rows])
def test_a_bad_argument_is_explained(kind, call, message, store):
    with pytest.raises(kind) as caught:
        call(store)
    assert message in str(caught.value)
