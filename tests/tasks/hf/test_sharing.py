"""Rows that begin alike, run once: the same outputs and gradients as one by one."""

import pytest
import torch
from torch import Tensor, nn

import attnflow as af
from attnflow.models.passes.evaluation import precision
from attnflow.tasks.hf.call_rows import to_rows
from tests.models import CAUSAL, WINDOW, ZOO, deep

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of transformers and peft, about their own names
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning"),  # transformers' own
]
PAD = 3
ALONE = "packed rows: the model computes other states for them than for each sequence alone"
ALONE_OF = {"GptOss", "OPT"}  # they make their masks without position_ids


def rows(sequences: list[list[int]], left: bool = False) -> dict[str, Tensor]:
    width = max(map(len, sequences))
    ids, real = [], []
    for one in sequences:
        pads = [PAD] * (width - len(one))
        ids.append([*pads, *one] if left else [*one, *pads])
        real.append([0] * len(pads) + [1] * len(one) if left else [1] * len(one) + [0] * len(pads))
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(real)}


PROMPT = [7, 9, 11, 13, 15, 17, 19, 21]
GROUP = [[*PROMPT, 4, 5, 6], [*PROMPT, 4, 8], [*PROMPT, 10, 5, 6], [*PROMPT, 4, 5, 6], [*PROMPT], [*PROMPT, 4, 8, 12]]
AGENTS = [[*PROMPT, 4], [*PROMPT, 5, 6, 7, 30], [*PROMPT, 5, 6, 7, 31, 32], [*PROMPT, 5, 33], [40, 41, 42], [40, 41]]
PREFIXES = len({tuple(one[: k + 1]) for one in [*GROUP, *AGENTS] for k in range(len(one))})


def packed(sequences: list[list[int]]) -> dict[str, Tensor]:
    """One row of several sequences, with all that trl's padding-free collator says of them."""
    sizes = torch.tensor([len(one) for one in sequences])
    borders = torch.tensor([0, *sizes.cumsum(0)], dtype=torch.int32)
    return {
        "input_ids": torch.cat([torch.tensor(one) for one in sequences])[None],
        "position_ids": torch.cat([torch.arange(len(one)) for one in sequences])[None],
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": int(sizes.max()),
        "max_length_k": int(sizes.max()),
        "seq_idx": torch.repeat_interleave(torch.arange(len(sequences)), sizes)[None],
    }


BATCHES = {
    "a group": rows(GROUP),
    "padded on the left": rows([*GROUP, GROUP[0]], left=True),
    "an agent's tree and another": rows(AGENTS),
    "both sides": {
        "input_ids": torch.tensor(
            [[PAD, 7, 8, 9, 10, 11, PAD], [PAD, 7, 8, 9, 10, 12, 13], [7, 8, 9, 10, 11, PAD, PAD]]
        ),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]]),
    },
    "packed": packed([*GROUP, *AGENTS]),
    "no padding": {"input_ids": torch.tensor([[*PROMPT, 4, 5], [*PROMPT, 4, 6], [*PROMPT, 7, 8]])},
}


def labelled(batch: dict[str, Tensor], whole: bool = False) -> dict[str, Tensor]:
    """With the label of every token after the prompt, or (whole) of every token that has one before it."""
    ids = batch["input_ids"]
    real = batch.get("attention_mask", torch.ones_like(ids))
    labels = ids.masked_fill(real * real.roll(1, 1) == 0, -100)
    labels[:, : 1 if whole else ids.shape[1] // 2 + 1] = -100
    return {**batch, "labels": labels}


def run(model: nn.Module, batch: dict[str, Tensor], **more: object):
    """(loss, logits at real tokens, gradients by name)."""
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    model.zero_grad()
    output = model(**batch, use_cache=False, **more)
    loss = output.loss
    if loss is None:
        weight = torch.linspace(-1, 1, output.logits[real].numel(), dtype=output.logits.dtype)
        loss = (output.logits[real].flatten() * weight).sum()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), output.logits.detach()[real], gradients


def assert_same(stock, shared, relative: float) -> None:
    for a, b in zip(stock[:2], shared[:2], strict=True):
        assert float((a - b).abs().max()) <= relative * float(a.abs().max())
    assert stock[2].keys() == shared[2].keys()
    largest = max(float(g.abs().max()) for g in stock[2].values())
    for name, gradient in stock[2].items():
        assert float((gradient - shared[2][name]).abs().max()) <= relative * largest, name


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", sorted(CAUSAL))
def test_every_architecture_in_float64(name, implementation):
    model = ZOO[name].build()
    try:
        model.set_attn_implementation(implementation)
    except ValueError:
        pytest.skip(f"{name} does not run with {implementation}")
    batches = [labelled(BATCHES["a group"]), labelled(BATCHES["packed"], whole=True)]  # labels across borders, too
    with precision(model, torch.float64):
        stock = [run(model, batch) for batch in batches]
        with af.tasks.share_prefixes(model) as handle:
            shared = [run(model, batch) for batch in batches]
            assert handle.no_copies == ""
    report = handle.report
    assert (report.calls, report.shared, list(report.stock)) == ((2, 1, [ALONE]) if name in ALONE_OF else (2, 2, []))
    assert report.tokens_after < report.tokens_before
    assert report.last_after == (PREFIXES if report.shared == 2 else report.last_before)
    for before, after in zip(stock, shared, strict=True):
        assert_same(before, after, 1e-9)


@pytest.mark.parametrize("kind", ["no labels", "labels", "labels everywhere"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["Llama", "OPT"])  # pads take a position, and none
def test_every_batch_in_float64(name, batch, kind):
    model = ZOO[name].build()
    given = BATCHES[batch] if kind == "no labels" else labelled(BATCHES[batch], kind == "labels everywhere")
    with precision(model, torch.float64):
        stock = run(model, given)
        with af.tasks.share_prefixes(model) as handle:
            shared = run(model, given)
    assert handle.report.shared == ((name, batch) != ("OPT", "packed"))
    assert_same(stock, shared, 1e-9)


def test_lora_dropout_is_refused_while_it_trains():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(ZOO["Llama"].make(), config).train()
    with af.tasks.share_prefixes(model):
        with pytest.raises(ValueError, match=r"needs a model without dropout, but .*lora_dropout.* has p = 0\.1"):
            model(**BATCHES["a group"], use_cache=False)
        model.eval()
        model(**BATCHES["a group"], use_cache=False)


def test_hidden_states_are_read_back_and_the_backbone_alone_too():
    model = ZOO["Gemma3"].make()
    given = BATCHES["a group"]
    real = given["attention_mask"].bool()
    for part, more in ((model, {}), (model.model, {}), (model, {"labels": labelled(given)["labels"]})):
        stock = part(**given, **more, use_cache=False, output_hidden_states=True).hidden_states
        with af.tasks.share_prefixes(model) as handle:
            shared = part(**given, **more, use_cache=False, output_hidden_states=True).hidden_states
        assert handle.report.shared == 1
        assert len(stock) == len(shared) == 3
        for a, b in zip(stock, shared, strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a[real], b[real])
            assert not b[~real].any()


LEFT = BATCHES["padded on the left"]
STOCK = {
    "a label behind a pad": (
        {**LEFT, "labels": LEFT["input_ids"].masked_fill(LEFT["attention_mask"] == 0, -100)},
        "a pad would predict a label (the first token of a sequence padded on the left): set that label to -100",
    ),
    "attention weights": ({"output_attentions": True}, "output_attentions was requested"),
    "other packed rows": (
        {"attention_mask": None, "cu_seq_lens_q": torch.tensor([0, 40, 66])},
        "its cu_seq_lens_q disagrees with the sequences that its position_ids mark",
    ),
    "a dense mask": (
        {"attention_mask": torch.ones(6, 1, 11, 11, dtype=torch.bool).tril()},
        "its attention_mask was not [batch, tokens]",
    ),
    "nothing alike": (
        {"input_ids": (torch.arange(66).reshape(6, 11) + 7) % 50},
        "its sequences share no prefix, or one so short that sharing is more work",
    ),
}


@pytest.mark.parametrize("kind", STOCK)
def test_what_cannot_be_shared_runs_as_it_came_and_is_counted(kind, caplog):
    model = ZOO["Llama"].make()
    changes, reason = STOCK[kind]
    given = {**BATCHES["a group"], "use_cache": False, **changes}
    stock = model(**given)
    with af.tasks.share_prefixes(model) as handle:
        shared = model(**given)
        model(**given)
    assert torch.equal(stock[0], shared[0])
    assert dict(handle.report.stock) == {reason: 2}
    assert handle.report.tokens_before == handle.report.tokens_after > 0
    assert [record.message for record in caplog.records if reason in record.message] == [
        f"share_prefixes: a call of the model was not shared: {reason}"
    ]
    assert f"2 calls not shared: {reason}" in str(handle.report)


def test_tuples_are_shared_and_those_of_the_backbone_run_as_they_came():
    model = ZOO["Llama"].make()
    given = {"input_ids": BATCHES["no padding"]["input_ids"], "use_cache": False, "return_dict": False}
    stock = model(**given)[0]
    with af.tasks.share_prefixes(model) as handle:
        torch.testing.assert_close(model(**given)[0], stock)
        assert handle.report.shared == 1
        model.model(**given)
    assert handle.report.stock == {"a tuple was requested (return_dict=False)": 1}


def test_groups_of_several_prompts_are_rows_of_their_own():
    model = ZOO["Llama"].make()
    generator = torch.manual_seed(0)
    prompts = torch.randint(4, 50, (3, 1, 40), generator=generator).expand(3, 4, 40)
    ids = torch.cat([prompts, torch.randint(4, 50, (3, 4, 8), generator=generator)], dim=-1).reshape(12, 48)
    stock = model(ids, use_cache=False).logits
    seen = []
    with af.tasks.share_prefixes(model) as handle:
        hook = model.model.embed_tokens.register_forward_hook(lambda m, args, out: seen.append(tuple(args[0].shape)))
        shared = model(ids, use_cache=False).logits
        hook.remove()
    torch.testing.assert_close(stock, shared)
    assert handle.report.last_after == 3 * (40 + 4 * 8)
    assert seen == [(3, 72)]


def test_a_window_is_counted_in_columns():
    """Positions that a caller gives turn the rotary embedding alone: transformers counts windows in columns."""
    model = ZOO["Mistral"].make()
    ids = torch.cat([torch.arange(4, 24).expand(3, 20), torch.arange(30, 36).reshape(3, 2)], dim=1)
    real = torch.ones_like(ids)
    real[:, 8:10] = 0  # a hole
    positions = torch.arange(0, 44, 2).expand(3, 22)
    assert WINDOW < 8
    given = {"input_ids": ids, "attention_mask": real, "position_ids": positions}
    stock = run(model, given)
    with af.tasks.share_prefixes(model) as handle:
        shared = run(model, given)
    assert handle.report.shared == 1
    assert_same(stock, shared, 1e-5)


def test_empty_rows_and_empty_completions():
    model = ZOO["Llama"].make()
    given = rows([[*PROMPT, 4], [*PROMPT], [], [*PROMPT, 5]])
    stock = run(model, given)
    with af.tasks.share_prefixes(model):
        assert_same(stock, run(model, given), 1e-5)
        nothing = {"input_ids": torch.full((2, 3), PAD), "attention_mask": torch.zeros(2, 3, dtype=torch.int64)}
        torch.testing.assert_close(model(**nothing, use_cache=False).logits.isnan().any(), torch.tensor(False))


WHY = {"T5": "the encoder-decoder", "BigBirdPegasus": "the encoder-decoder", "Llama4": "attends in chunks"}


@pytest.mark.parametrize("name", ["Jamba", "Bert", *WHY])
def test_models_that_are_refused_are_as_before(name):
    model = deep(name, **({"attention_chunk_size": 64} if name == "Llama4" else {}))
    with pytest.raises(af.UnsupportedArchitecture, match=WHY.get(name, ".")):
        af.tasks.share_prefixes(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's own, at compilation
def test_flex_without_gradients():
    model = ZOO["Llama"].make(hidden_size=64)
    model.set_attn_implementation("flex_attention")
    generator = torch.manual_seed(0)
    ids = torch.cat(
        [torch.randint(4, 50, (1, 130), generator=generator).expand(3, 130), torch.randint(4, 50, (3, 9))], dim=1
    )
    with torch.no_grad():
        stock = model(ids, use_cache=False, labels=ids).logits
        with af.tasks.share_prefixes(model) as handle:
            shared = model(ids, use_cache=False, labels=ids).logits
    assert handle.report.last_after == 130 + 3 * 9
    torch.testing.assert_close(stock, shared, atol=1e-4, rtol=1e-4)


def test_a_model_that_accelerate_has_prepared(monkeypatch):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    monkeypatch.setattr(AcceleratorState, "_shared_state", {})  # whatever a trainer of this process has set up
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(ZOO["Llama"].make())
    given = labelled(BATCHES["a group"])
    stock = run(model, given)
    with af.tasks.share_prefixes(model) as handle:
        shared = run(model, given)
    assert handle.report.shared == 1
    assert stock[1].dtype == shared[1].dtype == torch.float32
    assert_same(stock, shared, 2**-5)  # bfloat16 rounds at 2**-8


def test_a_model_shares_once():
    model = ZOO["Llama"].make()
    with af.tasks.share_prefixes(model), pytest.raises(RuntimeError, match="shares prefixes already"):
        af.tasks.share_prefixes(model)


def test_an_error_in_the_model_leaves_no_plan_behind():
    model = ZOO["Llama"].make()
    given = labelled(BATCHES["a group"])
    stock = model(**given, use_cache=False).loss
    with af.tasks.share_prefixes(model):

        def fail(*_: object) -> None:
            raise RuntimeError("out of memory")

        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(**given, use_cache=False)
        hook.remove()
        torch.testing.assert_close(model(**given, use_cache=False).loss, stock)
        outputs = model.model(input_ids=given["input_ids"], use_cache=False).last_hidden_state
        assert outputs.shape[:2] == given["input_ids"].shape


def test_gradients_of_rows_add_up_in_float32():
    from attnflow.tasks.prefixes import Batch, PassCost, plan

    ids = torch.ones(257, 3, dtype=torch.int64).numpy()
    chosen = plan(Batch(ids, ids > 0, ids * [0, 1, 2]), PassCost(1.0, 0.0, 0.0))
    assert chosen is not None
    states = torch.zeros(1, 3, 2, dtype=torch.bfloat16, requires_grad=True)
    to_rows(states, chosen).backward(torch.ones(257, 3, 2, dtype=torch.bfloat16) * 1.5)
    assert states.grad.unique().item() == torch.tensor(257 * 1.5).bfloat16().item()
