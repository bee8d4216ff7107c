# SPDX-License-Identifier: Apache-2.0
"""The house rules, read from the sources alone: floors, doors, sizes, and who may touch state and environment."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "farflung"
ROOMS = {
    1: "base",
    2: "config comm codec",
    3: "process precision tools address votes",
    4: "methods loop strategy checkpoint trackers",
    5: "exchanged cost",
    6: "outer big_model observe doctor",
    7: "members auto testing",
    8: "data",
    9: "hosts resume",
    10: "integrations",
    11: "launch",
    12: "accelerator",
    13: "compat",
    15: "demo as_accelerate",  # users of the doors
}
FLOORS = {room: floor for floor, rooms in ROOMS.items() for room in rooms.split()}
DOOR_FLOOR = 14
# The places that load our own modules by name, so that `import farflung` and `--help` don't load torch, an Accelerator
# no outer loop and none of the doors, and a codec no Triton; and what answers imports of `accelerate` by name.
# `config/recipes.py` goes further: it reads a file of a higher floor as text.
LAZY_TABLES = """
__init__.py base/lazy.py address/schemes.py launch/main.py launch/doctor.py launch/engines/submit.py
accelerator/__init__.py codec/blockwise.py as_accelerate/accelerate/__init__.py hosts/spawned.py
"""
FILES = sorted(SOURCE.rglob("*.py"))
NAMES = [path.relative_to(SOURCE).as_posix() for path in FILES]


@cache
def tree(name: str) -> ast.Module:
    return ast.parse((SOURCE / name).read_text())


@cache
def walk(node: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes below `node`, which many rules look at."""
    return tuple(ast.walk(node))


def room(name: str) -> str | None:
    """The room of a file, or None for a door."""
    first = name.split("/")[0]
    return first if "/" in name and first in FLOORS else None


def own_imports(node: ast.AST, for_types: bool = True) -> list[str]:
    """The modules of ours that `node` imports, also `for_types` alone, as paths below the package: `comm/group`."""
    found = []
    blocks = [inner for inner in walk(node) if isinstance(inner, ast.If) and ast.unparse(inner.test) == "TYPE_CHECKING"]
    typed = {inner for block in blocks for one in block.body for inner in walk(one)}
    for inner in walk(node):
        if inner in typed and not for_types:
            continue
        if isinstance(inner, ast.ImportFrom) and inner.module and inner.module.split(".")[0] == "farflung":
            paths = [f"{inner.module}.{alias.name}" for alias in inner.names]
            modules = [path for path in paths if f"{path.partition('.')[2].replace('.', '/')}.py" in NAMES]
            found += modules or ([inner.module] if inner.module != "farflung" else paths)
        elif isinstance(inner, ast.Import):
            found += [alias.name for alias in inner.names if alias.name.split(".")[0] == "farflung"]
        elif isinstance(inner, ast.ImportFrom) and inner.level:
            found.append("relative import")
    return [module.removeprefix("farflung.").replace(".", "/") for module in found]


@cache
def behind(file: str) -> set[str]:
    """The files of ours that load with `file`, itself among them, but for what the `__init__` of their rooms loads."""
    files, left = set(), [file]
    while left:
        if (one := left.pop()) not in files:
            files.add(one)
            left += [module for module in own_imports(tree(f"{one}.py"), for_types=False) if f"{module}.py" in NAMES]
    return files


def functions(node: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [inner for inner in walk(node) if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef))]


def in_every_file(names):
    """Make a test of a check of one file. A test for each rule and file would take ten seconds more."""

    def made(check):
        def test():
            broken = []
            for name in names:
                try:
                    check(name)
                except AssertionError as error:
                    broken.append(f"{name}: {error}")
            assert not broken, "\n".join(broken)

        return test

    return made


@in_every_file(NAMES)
def test_a_file_opens_with_a_licence_line_and_says_what_it_is_for(name):
    lines = (SOURCE / name).read_text().splitlines()
    assert lines[0] == "# SPDX-License-Identifier: Apache-2.0"
    assert ast.get_docstring(tree(name)), f"{name} has no docstring"


@in_every_file(NAMES)
def test_no_file_outgrows_500_lines_and_no_function_60(name):
    assert len((SOURCE / name).read_text().splitlines()) <= 500
    long = [f.name for f in functions(tree(name)) if _statement_lines(f) > 60]
    assert not long, f"{name}: {long}"


def _statement_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function's body without its docstring: a signature of many parameters is no complexity."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return 0 if not body else (body[-1].end_lineno or 0) - body[0].lineno + 1


@in_every_file(NAMES)
def test_imports_go_down(name):
    here = room(name)
    if here is None:
        return
    for module in own_imports(tree(name)):
        there = module.split("/")[0]
        floor = FLOORS.get(there, DOOR_FLOOR)
        assert there == here or floor < FLOORS[here], f"{name} (floor {FLOORS[here]}) imports {module} ({floor})"


@in_every_file([name for name in NAMES if room(name) == "observe"])
def test_what_shows_a_run_reads_files_alone(name):
    """It asks no process's port and no line: those are the doctor's."""
    imported = {alias.name for node in walk(tree(name)) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in walk(tree(name)) if isinstance(node, ast.ImportFrom) and node.module}
    for module in imported:
        assert module.split(".")[0] not in ("asyncio", "http", "ssl", "torch", "urllib"), f"it imports {module}"
        assert not module.startswith(("farflung.comm", "farflung.process.sockets", "farflung.doctor")), module
    asked = {node.attr for node in walk(tree(name)) if getattr(getattr(node, "value", None), "id", "") == "socket"}
    assert asked <= {"gethostname"}, f"it asks sockets for {asked}"


LOOP = {"base", "codec", "comm", "votes", "methods", "exchanged", "outer"}


@in_every_file([name for name in NAMES if room(name) in LOOP])
def test_the_outer_loop_needs_neither_an_address_nor_what_stands_above_it(name):
    for module in own_imports(tree(name)):
        assert module.split("/")[0] in LOOP or module == "config/outer", f"{name} imports {module}"


@in_every_file(NAMES)
def test_no_import_of_our_own_inside_a_function(name):
    for function in functions(tree(name)):
        assert not own_imports(function), f"{name}:{function.lineno} imports inside {function.name}"


def test_our_own_modules_are_loaded_by_name_in_few_places_only():
    users = [n for n in NAMES if "import_module" in (SOURCE / n).read_text()]
    assert set(users) <= set(LAZY_TABLES.split())


@in_every_file(NAMES)
def test_a_lazy_module_is_the_one_that_type_checkers_see(name):
    names = re.findall(r'LazyModule\("farflung\.([\w.]+)"\)', (SOURCE / name).read_text())
    assert {module.replace(".", "/") for module in names} <= {*own_imports(tree(name))}


def test_only_the_recipes_are_read_as_text():
    own_path = re.compile(r"__file__\)[.\w]* / ")
    assert [n for n in NAMES if own_path.search((SOURCE / n).read_text())] == ["config/recipes.py"]


def test_no_circle():
    graph = {name.removesuffix(".py").removesuffix("/__init__"): own_imports(tree(name)) for name in NAMES}
    graph = {file: [m for m in modules if m in graph] for file, modules in graph.items()}
    graph.pop("__init__", None)  # lazy, and for type checkers only
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, with the files of the circle


@in_every_file([n for n in NAMES if room(n) is None and n not in ("__init__.py", "__main__.py")])
def test_a_door_holds_only_imports_and_the_start_of_a_command(name):
    for node in tree(name).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_all = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        starts = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        is_import = isinstance(node, (ast.Import, ast.ImportFrom))
        assert is_docstring or is_all or starts or is_import, f"{name}:{node.lineno}"


@in_every_file(NAMES)
def test_the_environment_is_touched_in_one_place(name):
    for node in walk(tree(name)) if name != "config/environ.py" else ():
        touched = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
        if touched and isinstance(node.value, ast.Name) and node.value.id == "os":
            raise AssertionError(f"{name}:{node.lineno} touches the environment")


def test_one_file_asks_the_environment_whether_replicas_come_and_go_and_a_place_is_made_where_a_process_starts():
    names = re.compile(r"FARFLUNG_STORE|FARFLUNG_MEMBER\b|MEMBER_VARIABLES")
    users = {name for name in NAMES if names.search((SOURCE / name).read_text())}
    setters = {"config/environ.py", "config/launch.py", "launch/replicas.py"}
    assert users - setters == {"process/place.py"}
    makers = {name for name in NAMES if "Place.launched(" in (SOURCE / name).read_text()}
    starts = "process/bootstrap.py process/run_files.py hosts/data_parallel.py hosts/elastic.py launch/rank.py"
    assert makers == set(starts.split())


def test_membership_knows_its_board_and_not_what_carries_it():
    members = ("elastic", "admission", "settlement", "generation_watch", "peers")
    data = ("slots", "slot_board", "claims", "ledger")
    names = [f"members/{one}.py" for one in members] + [f"data/{one}.py" for one in data]
    for name in (*names, "outer/quorum.py", "address/board.py", "address/transport.py", "address/member_store.py"):
        text = (SOURCE / name).read_text()
        assert "torch.distributed" not in text, name
        assert "c10d_transport" not in text, name


@in_every_file(NAMES)
def test_module_state_lives_in_two_files(name):
    if name in ("process/world.py", "accelerator/session.py"):
        return
    for node in walk(tree(name)):
        assert not isinstance(node, ast.Global), f"{name}:{node.lineno} rebinds a global"
    for node in tree(name).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and _is_empty_container(value):
            raise AssertionError(f"{name}:{node.lineno} {target.id} starts empty, so something fills it")


def _is_empty_container(value: ast.AST | None) -> bool:
    if isinstance(value, (ast.List, ast.Set)):
        return not value.elts
    if isinstance(value, ast.Dict):
        return not value.keys
    call = isinstance(value, ast.Call) and isinstance(value.func, ast.Name)
    return call and value.func.id in ("list", "dict", "set", "defaultdict", "deque") and not value.args


@in_every_file(NAMES)
def test_the_kind_of_distribution_is_asked_in_two_places(name):
    for node in walk(tree(name)) if name not in ("strategy/choose.py", "accelerator/views.py") else ():
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            owners = [getattr(getattr(side, "value", None), "id", "") for side in sides]
            assert "DistributedType" not in owners, f"{name}:{node.lineno} compares a DistributedType"


@in_every_file(NAMES)
def test_sharded_tensors_are_recognized_in_one_place(name):
    names = {node.id for node in walk(tree(name)) if isinstance(node, ast.Name)}
    assert name == "comm/shards.py" or "DTensor" not in names, f"{name} knows about DTensor"


def test_no_two_classes_share_a_name():
    names = [node.name for name in NAMES for node in walk(tree(name)) if isinstance(node, ast.ClassDef)]
    assert sorted(name for name in {*names} if names.count(name) > 1) == []


def test_every_file_of_a_room_belongs_to_a_known_floor():
    folders = {p.name for p in SOURCE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders - set(FLOORS) <= {"utils", "commands", "test_utils"}


def test_what_serves_accelerates_names_alone_and_the_lowest_room_stay_small():
    """The figures stand in docs/concepts/compat.md: no more of them without a look at what can go."""
    lines = {name: (SOURCE / name).read_text().count("\n") for name in NAMES}
    assert sum(count for name, count in lines.items() if room(name) == "compat") <= 1_890
    assert sum(count for name, count in lines.items() if room(name) is None) <= 670
    assert sum(count for name, count in lines.items() if room(name) == "base") <= 2_000


def test_the_outer_loop_is_read_in_a_day():
    """What it needs whatever the recipe; `docs/concepts/outer.md` has the files in reading order."""
    files = behind("outer/engine")
    lines = sum((SOURCE / f"{file}.py").read_text().count("\n") for file in files)
    assert len(files) <= 56, sorted(files)
    assert lines <= 11_000, lines


# Whose words are looked at there: gloo's, NCCL's and torch's; those of transformers, of NVIDIA's driver, of torch.
FOREIGN_WORDS = {"base/causes.py", "launch/estimate.py", "doctor/machine.py", "loop/accumulation.py"}
FOREIGN_WORDS |= {
    "launch/engines/slurm.py",
    "launch/engines/ssh.py",
    "address/object_store.py",
}  # Slurm, rsync, obstore


@in_every_file([name for name in NAMES if name not in FOREIGN_WORDS])
def test_nothing_reads_a_sentence_of_ours(name):
    """What happened is an `Event`, why an error was raised its `Cause`: sentences are for people."""
    looks = []
    for node in walk(tree(name)):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            looks.append(node.left)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            is_regex = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
            looks += [node.args[0]] if is_regex or node.func.attr in ("startswith", "endswith") else []
    texts = [one.value for look in looks for one in ast.walk(look) if isinstance(one, ast.Constant)]
    assert not [text for text in texts if isinstance(text, str) and re.search(r"[a-z]{2} [a-z]{2}", text)]


def test_a_run_has_one_beginning_and_one_end():
    """Its folder is made, and its start and its end are recorded, by `launch_script` alone."""
    text = {name: (SOURCE / name).read_text() for name in NAMES}
    for call in ("= make_folder(", "record(Kind.STARTED", "record(Kind.ENDED"):
        assert {name: body.count(call) for name, body in text.items() if call in body} == {"launch/start.py": 1}, call
    (launched,) = [one for one in functions(tree("launch/start.py")) if one.name == "launch_script"]
    assert (launched.end_lineno or 0) - launched.lineno < 27


# What is unpickled: objects that a script gathers or scatters among the ranks of one world, states of random numbers
# that a loader's own workers send, values of `run_ranks`; and files whose reader knows numbers alone.
UNPICKLING = "comm/collectives.py comm/scatter.py checkpoint/rng.py testing/ranks.py checkpoint/sharded.py"


def users(*functions: str) -> set[str]:
    """The files that call one of these functions of modules, or derive a class from one."""
    found = set()
    for name in NAMES:
        nodes = walk(tree(name))
        used = [node.func for node in nodes if isinstance(node, ast.Call)]
        used += [base for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases]
        texts = (f"{getattr(one.value, 'id', '')}.{one.attr}" for one in used if isinstance(one, ast.Attribute))
        found |= {name} if set(functions) & set(texts) else set()
    return found


def test_few_places_unpickle_as_security_md_says_and_none_of_them_what_replicas_exchange():
    assert users("pickle.loads", "pickle.load", "pickle.Unpickler") == set(UNPICKLING.split())


def test_files_are_loaded_without_code_unless_a_script_asks_for_it():
    assert users("torch.load") == {"checkpoint/reader.py"}
    reader = (SOURCE / "checkpoint" / "reader.py").read_text(encoding="utf-8")
    assert 'torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})' in reader
    assert not users("yaml.load", "yaml.unsafe_load", "yaml.full_load")
