# SPDX-License-Identifier: Apache-2.0
"""`OuterConfig`: names and plain values that are recipes, and refusals that say what there is."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from farflung import Accelerator, OuterConfig
from farflung.accelerator.settings import resolve_outer
from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.config.files import write_file
from farflung.config.launch import FIELDS, LaunchSettings, launched_outer, rank_variables
from farflung.config.outer import COMMON, OPTIONS
from farflung.config.recipes import RECIPES
from farflung.config.resolve import resolve
from farflung.launch.main import farflung
from farflung.methods.arguments import recipe_of
from farflung.outer import (
    E3M0,
    AverageState,
    Int8,
    Levels,
    RadialMean,
    ResetState,
    diloco,
    hierarchical,
    local_sgd,
    quadratic,
    sparse_loco,
    streaming_diloco,
)
from tests.errors import error_of

VALUES = {
    "every": st.integers(4, 50),
    "rounds": st.integers(100, 1000),
    "lr": st.floats(0.1, 2),
    "momentum": st.floats(0, 0.85),
    "max_momentum": st.floats(0, 0.95),
    "nesterov": st.booleans(),
    "radial": st.booleans(),
    "pull": st.sampled_from([0.0, 0.5, 1.0]),
    "alpha": st.floats(0.01, 1),
    "beta": st.floats(0.01, 0.95),
    "fragments": st.integers(1, 4),
    "delay": st.integers(0, 4),
    "warmup": st.integers(0, 9),
    "levels": st.sampled_from(["4:2,64:all", "4:machine,64:all", "8:all"]),
    "seconds": st.floats(0.1, 9),
    "threshold": st.floats(1, 9),
    "temperature": st.floats(0.1, 9),
    "max_norm": st.floats(0.1, 99),
    "codec": st.sampled_from(["none", "bf16", "fp16"]),
    "exchange": st.just("gather"),
    "weigh_by": st.sampled_from(["steps", "items", "items_squared"]),
    "average": st.integers(1, 50),
    "anchor_on_cpu": st.booleans(),
    "inner": st.sampled_from(["keep", "average", "reset"]),
    "bucket_bytes": st.integers(1, 2**30),
    "same_data": st.booleans(),
    "robust": st.just("trimmed"),
    "steps": st.integers(10_000, 10**6),
    "report": st.sampled_from(["auto", "round", "off", "30"]),
}


WITHOUT_ANCHOR = ("local_sgd", "post_local_sgd", "hierarchical", "quadratic", "gossip")


@st.composite
def configs(draw):
    recipe = draw(st.sampled_from(sorted(RECIPES)))
    arguments = RECIPES[recipe]
    possible = [each.name for each in (*arguments, *COMMON)]
    names = {*draw(st.lists(st.sampled_from(possible), unique=True))}
    names |= {each.name for each in arguments if each.is_needed}
    if recipe == "edit":
        names = names - {"seconds"} | {"every"}
    if recipe in ("streaming_diloco", "eager_diloco"):
        names -= {"inner"}  # with a delay no round stops the training
    if "radial" in names:
        names -= {"exchange"}  # it has one of its own
    if "momentum" in names:
        names -= {"max_momentum"}  # of one that grows
    if recipe == "noloco":
        names -= {"codec"}  # which would round anchors
    if recipe not in ("local_sgd", "quadratic", "slowmo", "diloco", "streaming_diloco"):
        names -= {"robust"}
    elif "robust" in names:
        names -= {"inner", "radial"}
    if recipe in ("edit", "gossip", "noloco") or "robust" in names:
        names -= {"weigh_by"}  # they do not weight replicas by their work
    if recipe in WITHOUT_ANCHOR:
        names -= {"anchor_on_cpu"}
    assert names <= VALUES.keys(), f"VALUES of this file has no row for {names - VALUES.keys()} of {recipe}"
    return {"recipe": recipe, **{name: draw(VALUES[name]) for name in sorted(names)}}


def test_each_option_is_a_launch_setting_and_the_other_way_round():
    told = {entry.name for entry in FIELDS if entry.name.startswith("outer_")}
    assert told == {f"outer_{name}" for name in (*OPTIONS, "recipe")}
    odd = set(OPTIONS) ^ VALUES.keys()
    assert not odd, (
        f"tests/accelerator/test_outer_config.py: VALUES must have values to try for each argument; see {odd}"
    )


@settings(max_examples=60)
@given(said=configs())
def test_what_can_be_said_makes_a_recipe_with_and_without_an_anchor(said):
    config = OuterConfig(**said)
    recipe = recipe_of(config, local_size=2)
    assert (recipe.optimizer is None) is (config.recipe in WITHOUT_ANCHOR)
    assert recipe.anchor_on_cpu is bool(said.get("anchor_on_cpu"))
    assert recipe.weigh_by == said.get("weigh_by", "steps")
    assert recipe.bucket_bytes == said.get("bucket_bytes")
    assert recipe.same_data is bool(said.get("same_data"))


@settings(max_examples=60)
@given(said=configs())
def test_script_file_variables_and_flags_mean_the_same(said, tmp_path_factory):
    config = OuterConfig(**said)
    settings = {f"outer_{name}": value for name, value in said.items()}
    told = rank_variables(LaunchSettings.of(settings))
    with environ.patched(told):
        assert launched_outer() == config == resolve_outer(None) == resolve_outer(config)

    folder = tmp_path_factory.mktemp("files")
    block = "outer:\n" + "".join(f"  {name}: {str(value).lower()}\n" for name, value in said.items())
    (folder / "block.yaml").write_text(block)
    flags = {name: value if isinstance(value, bool) else str(value) for name, value in settings.items()}
    for said_so in (
        {"config_file": str(folder / "block.yaml")},
        {"config_file": str(write_file(folder / "flat.yaml", settings))},
        flags,
    ):
        with environ.patched(rank_variables(resolve(said_so).settings)):
            assert launched_outer() == config


MEANT = [
    (
        OuterConfig("diloco", every=32, rounds=30, lr=0.5, codec="int8", inner="reset"),
        replace(diloco(32, rounds=30, lr=0.5, codec=Int8()), inner=ResetState()),
    ),
    (OuterConfig("quadratic", every=4, alpha=0.1, inner="average"), replace(quadratic(4, 0.1), inner=AverageState())),
    (OuterConfig("streaming_diloco", radial=True), replace(streaming_diloco(), aggregator=RadialMean())),
    (OuterConfig("sparse_loco", codec="e3m0"), sparse_loco(codec=E3M0())),
    (OuterConfig("local_sgd", every=3, weigh_by="items"), replace(local_sgd(3), weigh_by="items")),
]


@pytest.mark.parametrize(("config", "meant"), MEANT)
def test_names_mean_what_the_functions_make(config, meant):
    ours = recipe_of(config, 1)
    assert getattr(ours.optimizer, "keywords", None) == getattr(meant.optimizer, "keywords", None)
    assert replace(ours, optimizer=meant.optimizer) == meant


@pytest.mark.parametrize(
    ("levels", "local_size", "expected"),
    [
        ({4: "machine", 64: None}, 8, {4: 8, 64: None}),
        ("4:machine, 64:all", 8, {4: 8, 64: None}),
        ("4:machine,64:all", 1, {64: None}),  # nobody to average with on such a machine
        ("2:4,8:8,64:all", 8, {2: 4, 8: 8, 64: None}),
    ],
)
def test_a_level_can_be_the_ranks_of_a_machine(levels, local_size, expected):
    recipe = recipe_of(OuterConfig("hierarchical", levels=levels), local_size)
    assert recipe.schedule == hierarchical(expected).schedule == Levels(expected)


def test_an_error_names_the_variable_the_flag_or_the_line_of_the_file(tmp_path):
    file, script = tmp_path / "block.yaml", tmp_path / "train.py"
    file.write_text("outer:\n  recipe: diloco\n  every: 0\n")
    script.touch()

    def launched(*flags):
        return error_of(ConfigError, farflung.main, ["launch", "--cpu", *flags, str(script)], standalone_mode=False)

    wrong = "every is 0; it must be a whole number, 1 or more."
    assert launched("--config_file", str(file)).endswith(f"block.yaml:3: {wrong}")
    assert launched("--outer", "diloco", "--outer-every", "0") == f"--outer_{wrong}"
    with environ.patched({"FARFLUNG_OUTER_RECIPE": "diloco", "FARFLUNG_OUTER_EVERY": "0"}):
        with pytest.raises(ConfigError, match=r"FARFLUNG_OUTER_EVERY is 0; it must be a whole number"):
            resolve_outer(None)
        assert launched() == f"FARFLUNG_OUTER_EVERY{wrong.removeprefix('every')}"


def test_options_of_no_recipe_are_refused():
    with pytest.raises(ConfigError, match=r"--outer-every needs a recipe: set --outer, for example --outer diloco"):
        LaunchSettings(outer_options={"every": 4})
    with environ.patched({"FARFLUNG_OUTER_EVERY": "4"}), pytest.raises(ConfigError, match="FARFLUNG_OUTER_RECIPE"):
        launched_outer()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("FARFLUNG_OUTER", "FARFLUNG_OUTER_RECIPE"),
        ("FARFLUNG_OUTER_EVRY", "FARFLUNG_OUTER_EVERY"),
        ("FARFLUNG_HANG_TIMEOUT", "FARFLUNG_HANG_TIMEOUT_S"),
        ("FARFLUNG_MIXED_PRECISION", "ACCELERATE_MIXED_PRECISION"),
        ("FARFLUNG_NUM_PROCESSES_", "FARFLUNG_NUM_PROCESSES"),
        ("FARFLUNG_ELEPHANT", None),
    ],
)
def test_a_variable_that_nothing_reads_is_refused(name, meant):
    near = "" if meant is None else rf" Did you mean `{meant}`\?"
    message = rf"^The environment variable {name} is not a setting\.{near} Unset or correct it\.$"
    with environ.patched({name: "diloco"}):
        for reader in (launched_outer, lambda: resolve({}), lambda: Accelerator(cpu=True)):
            with pytest.raises(ConfigError, match=message):
                reader()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FARFLUNG_HANG_TIMEOUT_S", "x"),
        ("FARFLUNG_HANG_TIMEOUT_S", "-4"),
        ("FARFLUNG_HANG_TIMEOUT_S", "inf"),
        ("FARFLUNG_MAX_RESTARTS", "x"),
        ("FARFLUNG_MULTI_GPU", "maybe"),
    ],
)
def test_a_variable_that_holds_no_value_of_its_setting_is_refused_in_one_process_too(name, value):
    with environ.patched({name: value}):
        for reader in (lambda: resolve({}), lambda: Accelerator(cpu=True)):
            with pytest.raises(ConfigError, match=rf"{name.removeprefix('FARFLUNG_')}.* is .?{value}|is {value}"):
                reader()


def test_a_script_and_a_launcher_that_want_different_loops_are_told_so():
    """What one of them writes about the same loop is no difference."""
    launched = {"FARFLUNG_OUTER_RECIPE": "diloco", "FARFLUNG_OUTER_EVERY": "8"}
    with environ.patched(launched):
        assert resolve_outer(OuterConfig("diloco", every=8)) == OuterConfig("diloco", every=8)
        with pytest.raises(ConfigError, match=r"script asks for diloco with .*32.*the launcher for diloco with .*8"):
            resolve_outer(OuterConfig("diloco", every=32))
    with environ.patched(launched | {"FARFLUNG_OUTER_REPORT": "off"}):
        assert resolve_outer(OuterConfig("diloco", every=8)) == OuterConfig("diloco", every=8, report="off")
        with pytest.raises(ConfigError, match=r"'report': 'round'.*'report': 'off'"):
            resolve_outer(OuterConfig("diloco", every=8, report="round"))


def test_how_much_is_sent_at_a_time_reaches_the_loop():
    accelerator = Accelerator(cpu=True, outer=OuterConfig("local_sgd", every=2, bucket_bytes=1024))
    model = torch.nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    assert accelerator.outer_loops[0].state_dict()["description"].endswith("buckets of 1024 bytes")
    accelerator.end_training()
