"""What is installed for one denoiser, and what is said of it."""

import torch
from speed_tier.speed.engagement import Call, Engagement, compile_facts, model_facts
from speed_tier.speed.patching import Patch
from speed_tier.speed.report import CompiledKind, CompileFacts, State
from speed_tier.tests.speed import tiny
from speed_tier.tests.speed.runs import Fake


def engagement(log, **handles):
    made = Engagement(None)
    for name, more in handles.items():
        row = Fake(name, log, handle=more)
        made.engaged(row, row.install(None))
    made.seal()
    return made


def test_scopes_are_outside_of_the_patches_in_order():
    log, model = [], tiny.toy(1)
    patch = Patch(model, "mark", 1)
    made = engagement(log, a={"patches": [patch], "options": {"x": 1}}, b={"options": {"y": 2}})
    log.clear()
    with made.around_call():
        assert model.mark == 1
        log.append("call")
    assert not hasattr(model, "mark")
    assert log == ["enter a", "enter b", "call", "leave b", "leave a"]
    assert made.options == {"x": 1, "y": 2}


def test_outcomes_settle_on_what_the_handles_say_at_the_end():
    made = engagement([], a={"note": "fine"}, b={"fell_back": "broke"}, c={"not_used": "no gain"})
    made.skip(Fake("d", []), "not here")
    made.fell_back(Fake("e", []), "wrong")
    assert [(o.name, o.state, o.reason, o.note) for o in made.settled()] == [
        ("a", State.ENGAGED, "", "fine"),
        ("b", State.FELL_BACK, "broke", ""),
        ("c", State.SKIPPED, "no gain", ""),
        ("d", State.SKIPPED, "not here", ""),
        ("e", State.FELL_BACK, "wrong", ""),
    ]


def test_what_was_compiled_is_added_up():
    facts = [
        CompileFacts([CompiledKind("layers", 3, 1)], 2, 1, {"why": 1}, 0.5),
        CompileFacts([CompiledKind("refiner", 1, 1)], 1, 0, {"why": 2, "how": 1}, 0.25),
    ]
    made = [engagement([], a={"facts": each}) for each in facts]
    total = compile_facts([*made, engagement([], b={})])
    assert [kind.name for kind in total.kinds] == ["layers", "refiner"]
    assert (total.graphs, total.recompiles, total.seconds) == (3, 1, 0.75)
    assert total.graph_breaks == {"why": 3, "how": 1}


def test_models_are_told_apart_and_named():
    first, second = tiny.toy(1), tiny.qwen_image(layers=1)
    call = Call(first, tiny.CPU, torch.bfloat16, (1, 16, 8, 8))
    unknown = model_facts(call, None)
    assert (unknown.family, unknown.class_name, unknown.dtype) == ("", "Toy", "bfloat16")
    assert "Toy" in unknown.note
    known = model_facts(Call(second, tiny.CPU, torch.float32, (1, 16, 8, 8)), (tiny.TOY, "comfyui"))
    assert (known.family, known.stack, known.note) == ("toy", "comfyui", "")
    assert known.number != unknown.number == model_facts(call, None).number
