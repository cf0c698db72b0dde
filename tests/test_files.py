"""Files against kills: writes that happen or do not, records cut at any byte, folders replaced as a whole."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colar import __version__, files, processes, yaml_settings
from colar.evaluation.provenance import collect_provenance

RECORDS = [
    {"id": "a/1", "text": "drei Äpfel\nund 数"},
    {"id": "a/2", "n": 1.5, "list": [1, None]},
    {"id": "a/3"},
]

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(files.__file__).parents[1])}


def write_records(path, records):
    with files.append_jsonl(path) as write:
        for record in records:
            write(record)


# One file


def test_a_write_replaces_the_whole_file_and_makes_its_folders(tmp_path):
    path = tmp_path / "new" / "deep" / "x.json"
    for value in ({"a": "long" * 1000}, {"b": "ü"}):
        assert files.write_json(path, value) == path
        assert files.read_json(path) == value
    assert "ü" in path.read_text(encoding="utf-8")
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": object()}], ids=["nan", "inf", "object"])
def test_what_cannot_be_written_leaves_the_old_file(tmp_path, value):
    path = files.write_json(tmp_path / "x.json", {"old": 1})
    with pytest.raises((ValueError, TypeError)):
        files.write_json(path, value)
    assert files.read_json(path) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_at_its_end_leaves_the_old_file_and_no_rubbish(tmp_path):
    (tmp_path / "x" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="x"):  # a folder cannot be replaced by a file
        files.write_text(tmp_path / "x", "text")
    with pytest.raises(UnicodeEncodeError):
        files.write_text(tmp_path / "y", "\ud800")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.fixture
def umask_stays(monkeypatch):
    """It is the whole process's: in the moment in which it is read by setting it, other threads' files are open to all."""
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask was set"))


@pytest.mark.usefixtures("umask_stays")
def test_a_new_file_is_readable_as_the_umask_says(tmp_path):
    """A file of `tempfile` has 0600: results that colleagues cannot read."""
    plain = tmp_path / "plain"
    plain.touch()
    assert files.write_text(tmp_path / "x", "text").stat().st_mode == plain.stat().st_mode


@pytest.mark.usefixtures("umask_stays")
def test_a_new_folders_files_are_readable_as_the_umask_says(tmp_path):
    """Also one that a library wrote for its owner alone, as safetensors does."""
    plain = tmp_path / "plain"
    plain.write_text("text")
    with files.replace_folder(tmp_path / "new") as partial:
        (partial / "inner").mkdir()
        for path in (partial / "weights", partial / "inner" / "weights"):
            path.write_text("text")
            path.chmod(0o600)
    for path in (tmp_path / "new" / "weights", tmp_path / "new" / "inner" / "weights"):
        assert path.stat().st_mode == plain.stat().st_mode


def test_broken_json_is_named_with_its_line(tmp_path):
    path = files.write_text(tmp_path / "x.json", '{\n"a": 1,\n}')
    with pytest.raises(ValueError, match=rf"{path}:3: not valid JSON"):
        files.read_json(path)
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=rf"{path}: not UTF-8"):
        files.read_json(path)


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    mark = b"\xef\xbb\xbf"
    for name, text in (("a.json", '{"a": 1}'), ("a.yaml", "a: 1\r\nbase: b.yaml\r\n"), ("b.yaml", "c: 2\n")):
        (tmp_path / name).write_bytes(mark + text.encode())
    assert files.read_json(tmp_path / "a.json") == {"a": 1}
    assert list(yaml_settings.yaml_layers(tmp_path / "a.yaml").values()) == [{"a": 1}, {"c": 2}]
    records = tmp_path / "a.jsonl"
    records.write_bytes(mark + b'{"a": 1}\r\n' + mark + b'{"a": 2}\r\n' + mark)
    assert list(files.read_jsonl(records)) == [(1, {"a": 1}), (2, {"a": 2})]
    for read, name in (
        (files.read_json, "u.json"),
        (yaml_settings.yaml_layers, "u.yaml"),
        (files.resume_jsonl, "u.jsonl"),
    ):
        (tmp_path / name).write_text("{}\n", encoding="utf-16")
        with pytest.raises(ValueError, match=rf"{name}(:1)?: not UTF-8 text: .*; save it as UTF-8"):
            read(tmp_path / name)


def test_a_number_that_python_cannot_read_is_named_with_its_line(tmp_path):
    path = files.write_text(tmp_path / "x.json", "1" * 5000)
    with pytest.raises(ValueError, match=rf"{path}: .*4300 digits"):
        files.read_json(path)
    files.write_text(path, '{}\n{"a": ' + "1" * 5000 + "}\n")
    with pytest.raises(ValueError, match=rf"{path}:2: .*4300 digits"):
        list(files.read_jsonl(path))


# Records


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' is there twice"),
        ('{\n "a": 1,\n "b": {\n  "c": 1,\n  "c": 1}\n}', "the key 'c' is there twice"),
        (
            '[{"q": "\\n"},\n {"q": "x"},\n {"q": "x", "r": [], "q": "x"}]',
            "the key 'q' is there twice",
        ),
    ],
)
def test_a_key_that_is_there_twice_in_json_is_named(tmp_path, text, words):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"rows\.json: ") as error:
        files.read_json(path)
    assert words in str(error.value)
    path.write_text('{"a": {"a": 1}}\n' + text.replace("\n", "") + "\n")
    with pytest.raises(ValueError, match=r"rows\.json:2: the key '.' is there twice"):
        list(files.read_jsonl(path))


def test_records_come_back_with_their_line_numbers(tmp_path):
    path = tmp_path / "sub" / "r.jsonl"
    write_records(path, RECORDS[:1])
    write_records(path, RECORDS[1:])
    assert list(files.read_jsonl(path)) == list(enumerate(RECORDS, start=1))
    path.write_text(path.read_text(encoding="utf-8").replace("\n", "\n\n"), encoding="utf-8")
    assert [number for number, _ in files.read_jsonl(path)] == [1, 3, 5]


def test_each_record_is_on_disk_before_the_next(tmp_path):
    with files.append_jsonl(tmp_path / "r.jsonl") as write:
        for n, record in enumerate(RECORDS, start=1):
            write(record)
            assert len(list(files.read_jsonl(tmp_path / "r.jsonl"))) == n


def test_a_record_that_is_no_json_leaves_no_torn_line(tmp_path):
    write_records(tmp_path / "r.jsonl", RECORDS)
    with (
        files.append_jsonl(tmp_path / "r.jsonl") as write,
        pytest.raises(ValueError, match="not JSON compliant"),
    ):
        write({"loss": float("nan")})
    assert files.resume_jsonl(tmp_path / "r.jsonl") == RECORDS


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_kill_at_any_byte_costs_one_record_at_most(tmp_path_factory, data):
    """Cut in the middle of a line, of a character even: the whole records stay, and appending goes on."""
    path = tmp_path_factory.mktemp("torn") / "r.jsonl"
    write_records(path, RECORDS)
    raw = path.read_bytes()
    cut = data.draw(st.integers(0, len(raw)))
    path.write_bytes(raw[:cut])
    whole = raw[:cut].count(b"\n")
    # Also where nobody reads the file before it goes on: a torn line may not get the next record at its end.
    if data.draw(st.booleans()):
        assert files.resume_jsonl(path) == RECORDS[:whole]
    write_records(path, RECORDS[whole:])
    assert files.resume_jsonl(path) == RECORDS


def test_nothing_to_resume(tmp_path):
    assert files.resume_jsonl(tmp_path / "none.jsonl") == []
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize("damage", [b'{"id": "a/', b"\xff\xfe", b"\x00\x00", b"{}{}"])
def test_damage_in_the_middle_is_an_error_with_its_line(tmp_path, damage):
    """Only a torn last line is ours to drop; the file is left for a person to look at."""
    lines = [json.dumps(record).encode() for record in RECORDS]
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"\n".join([lines[0], damage, lines[2]]) + b"\n")
    before = path.read_bytes()
    for read in (files.resume_jsonl, lambda p: list(files.read_jsonl(p))):
        with pytest.raises(ValueError, match=rf"{path}:2: not "):
            read(path)
    assert path.read_bytes() == before


# Folders


def tree(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def fill(target, **texts):
    with files.replace_folder(target) as partial:
        for name, text in texts.items():
            files.write_text(partial / name, text)


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    target = tmp_path / "runs" / "final"
    fill(target, a="1", b="1")
    fill(target, a="2")
    assert tree(tmp_path) == {"runs/final/a": "2"}


def test_a_folder_behind_a_link_is_replaced_as_often_as_one_likes(tmp_path):
    """`runs/mine/best` may lead to a larger disk: it still does, and the folder there is the new one."""
    (tmp_path / "disk" / "best").mkdir(parents=True)
    (tmp_path / "best").symlink_to(tmp_path / "disk" / "best")
    for text in "123":
        fill(tmp_path / "best", a=text)
        assert (tmp_path / "best").is_symlink()
        assert (tmp_path / "best" / "a").read_text() == text
        assert tree(tmp_path / "disk") == {"best/a": text}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "disk"]


def test_what_fails_while_a_folder_is_filled_leaves_the_old_one(tmp_path):
    fill(tmp_path / "final", a="1")

    def break_off():
        with files.replace_folder(tmp_path / "final") as partial:
            files.write_text(partial / "a", "2")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert tree(tmp_path) == {"final/a": "1"}


def test_a_kill_while_a_folder_is_filled_leaves_the_old_one(tmp_path):
    fill(tmp_path / "final", a="1")
    program = (
        "import os, sys; from colar import files\n"
        "with files.replace_folder(sys.argv[1]) as partial:\n"
        "    files.write_text(partial / 'a', '2'); os._exit(9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "final")], env=ENVIRONMENT, check=False
    )
    assert done.returncode == 9
    assert tree(tmp_path / "final") == {"a": "1"}
    assert (tmp_path / ".final.partial").exists()
    fill(tmp_path / "final", a="3")
    assert tree(tmp_path) == {"final/a": "3"}


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    """What it leaves: no `final`, the old folder and the new one beside. The next call puts the old one back."""
    fill(tmp_path / "final", a="1")
    os.replace(tmp_path / "final", tmp_path / ".final.old")
    fill(tmp_path / ".final.partial", a="2")
    with pytest.raises(OSError, match="disk full"), files.replace_folder(tmp_path / "final"):
        raise OSError("disk full")
    assert tree(tmp_path) == {"final/a": "1"}


def test_an_output_folder_is_tried_before_long_work(tmp_path):
    assert files.require_writable(tmp_path / "a" / "b").is_dir()
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write to .*file/sub"):
        files.require_writable(tmp_path / "file" / "sub")


def test_an_output_folder_without_a_name_is_not_the_working_directory(tmp_path, monkeypatch):
    """`--output "$OUT"`, where OUT was never set."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the output folder has no name"):
        files.require_writable("")
    assert files.require_writable(".").is_dir()


def test_a_folder_is_one_process_s_until_that_ends_or_is_killed(tmp_path):
    program = (
        "import sys; from colar import processes\n"
        "with processes.locked(sys.argv[1]):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match="another process is writing to"), processes.locked(tmp_path):
            pass
        holder.kill()
    with processes.locked(tmp_path), processes.locked(tmp_path / "."):  # one process may ask twice
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_keeps_nobody_out_and_says_so(tmp_path, monkeypatch, capsys, number):
    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refused)
    inside = False
    with processes.locked(tmp_path):
        inside = True
    assert inside
    # Without the system call filelock locks by the file's existence.
    warned = f"{tmp_path} is on a file system without locks" in capsys.readouterr().err
    assert warned == (number != errno.ENOSYS)
    with pytest.raises(OSError, match="of the block itself"), processes.locked(tmp_path):
        raise OSError("of the block itself")


def test_a_lock_that_cannot_be_made_for_another_reason_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"), processes.locked(tmp_path / "file" / "folder"):
        pytest.fail("the block ran without a lock")


# Provenance


def test_provenance_says_where_a_result_came_from():
    found = json.loads(json.dumps(collect_provenance()))
    assert found["versions"]["colar"] == __version__  # ours even where nothing is installed
    assert found["versions"]["torch"]
    assert found["machine"]["cores"] == os.cpu_count()
    # Two processors of one name differ by a factor of ten in what they multiply with.
    assert torch.backends.cpu.get_cpu_capability() in found["machine"]["instructions"]
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("/bin/colar", "colar report --pair 'colar c=4' coconut"),  # to be run again as it stands
        (str(Path(files.__file__).parent / "cli" / "__main__.py"), "colar report --pair 'colar c=4' coconut"),
        ("lab/scripts/grpo_report.py", "python lab/scripts/grpo_report.py report --pair 'colar c=4' coconut"),
        ("/opt/kernel/launcher.py", "launcher.py"),  # whatever that is: none of the machine's paths
        ("", ""),
    ],
)
def test_provenance_has_the_command_as_one_would_type_it(program, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program, "report", "--pair", "colar c=4", "coconut"])
    assert collect_provenance()["command"] == command


def test_a_variable_that_is_empty_is_not_set(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    for name in ("COLAR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
    assert files.cache_folder() == Path("/home/ann/.cache/colar")
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp/cache")
    assert files.cache_folder() == Path("/tmp/cache/colar")
    monkeypatch.setenv("COLAR_CACHE", "/tmp/own")
    assert files.cache_folder() == Path("/tmp/own")
