"""Solutions of assignment 5 that are wrong, each in a likely way. A docstring is what the student must read."""

import json
import os
import shutil
import tempfile
from pathlib import Path

from tasks.assignment5 import as_bytes, library_publish, library_publish_once, library_read, read, steps, sync_folder

# -------------------------------------------------------------------------------------------------------------- publish


def _text(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _temporary(path):
    return path.with_name(path.name + ".tmp")


def _write(path, text, mode="w", flush=True, fsync=True, encoding="utf-8"):
    with open(path, mode, encoding=encoding) as file:
        file.write(text)
        if flush:
            file.flush()
        if fsync:
            os.fsync(file.fileno())


def publish__in_place(path, rows):
    """under the final name"""
    _write(path, _text(rows))
    sync_folder(path.parent)


def publish__appended_line_by_line(path, rows):
    """under the final name"""
    for row in rows or [""]:
        with open(path, "a", encoding="utf-8") as file:
            file.write(_text([row]) if row else "")


def publish__copied_into_place(path, rows):
    """under the final name"""
    _write(_temporary(path), _text(rows))
    shutil.copyfile(_temporary(path), path)
    _temporary(path).unlink()


def publish__temporary_elsewhere(path, rows):
    """a rename across disks is a copy"""
    handle, name = tempfile.mkstemp(dir=Path.cwd())
    os.write(handle, _text(rows).encode("utf-8"))
    os.fsync(handle)
    os.close(handle)
    os.replace(name, path)
    sync_folder(path.parent)


def publish__temporary_with_a_readers_name(path, rows):
    """readers ignore this name"""
    _write(path.with_name("new-" + path.name), _text(rows))
    os.replace(path.with_name("new-" + path.name), path)
    sync_folder(path.parent)


def publish__never_renamed(path, rows):
    """there is no file under its final name"""
    _write(_temporary(path), _text(rows))


def publish__last_newline_missing(path, rows):
    """every line ends with a newline"""
    _write(_temporary(path), "\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    os.replace(_temporary(path), path)


def publish__escaped(path, rows):
    """ensure_ascii=False"""
    _write(_temporary(path), "".join(json.dumps(row) + "\n" for row in rows))
    os.replace(_temporary(path), path)


def publish__one_list(path, rows):
    """one line of JSON for each row"""
    _write(_temporary(path), json.dumps(rows, ensure_ascii=False) + "\n")
    os.replace(_temporary(path), path)


def publish__leftover_in_the_way(path, rows):
    """overwrite it"""
    _write(_temporary(path), _text(rows), mode="x")
    os.replace(_temporary(path), path)
    sync_folder(path.parent)


def publish__appended_to_a_leftover(path, rows):
    """the file must hold one line of JSON for each row"""
    _write(_temporary(path), _text(rows), mode="a")
    os.replace(_temporary(path), path)
    sync_folder(path.parent)


def publish__no_fsync(path, rows):
    """os.fsync it before os.replace"""
    _write(_temporary(path), _text(rows), fsync=False)
    os.replace(_temporary(path), path)
    sync_folder(path.parent)


def publish__fsync_before_flush(path, rows):
    """flush the file and os.fsync it"""
    _write(_temporary(path), _text(rows), flush=False)
    os.replace(_temporary(path), path)
    sync_folder(path.parent)


def publish__fsync_after_rename(path, rows):
    """os.fsync it before os.replace"""
    _write(_temporary(path), _text(rows), fsync=False)
    os.replace(_temporary(path), path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    sync_folder(path.parent)


def publish__folder_not_synced(path, rows):
    """a power failure can still undo the new name"""
    _write(_temporary(path), _text(rows))
    os.replace(_temporary(path), path)


def publish__folder_synced_before_rename(path, rows):
    """a power failure can still undo the new name"""
    _write(_temporary(path), _text(rows))
    sync_folder(path.parent)
    os.replace(_temporary(path), path)


def publish__encoding_of_the_machine(path, rows):
    """encoding='utf-8'"""
    _write(_temporary(path), _text(rows), encoding=None)
    os.replace(_temporary(path), path)
    sync_folder(path.parent)


def publish__encoding_of_the_machine_by_pathlib(path, rows):
    """encoding='utf-8'"""
    _temporary(path).write_text(_text(rows))
    os.replace(_temporary(path), path)


def publish__other_characters_replaced(path, rows):
    """is not the rows' text"""
    _temporary(path).write_bytes(_text(rows).encode("latin-1", errors="replace"))
    os.replace(_temporary(path), path)


# --------------------------------------------------------------------------------------------------------- publish_once


def publish_once__written_anew(path, rows):
    """leave the published file alone"""
    library_publish(path, rows)


def publish_once__whatever_is_there_stays(path, rows):
    """must be refused"""
    if not path.exists():
        library_publish(path, rows)


def publish_once__the_same_is_refused(path, rows):
    """are no error"""
    if path.exists():
        raise ValueError(f"{path.name} exists")
    library_publish(path, rows)


def publish_once__only_counted(path, rows):
    """as many as before"""
    if not path.exists():
        library_publish(path, rows)
    elif len(library_read(path)) != len(rows):
        raise ValueError(path.name)


def publish_once__a_beginning_is_enough(path, rows):
    """fewer rows"""
    if not path.exists():
        library_publish(path, rows)
    elif not path.read_bytes().startswith(as_bytes(rows)):
        raise ValueError(path.name)


def publish_once__written_then_refused(path, rows):
    """must not change the published file"""
    old = path.read_bytes() if path.exists() else None
    if old == as_bytes(rows):
        return
    library_publish(path, rows)
    if old is not None:
        raise ValueError(path.name)


def publish_once__assert(path, rows):
    """with a ValueError"""
    if not path.exists():
        library_publish(path, rows)
    assert path.read_bytes() == as_bytes(rows), path.name


def publish_once__an_empty_file_is_not_published(path, rows):
    """an empty file is published, too"""
    if not path.exists() or not path.read_bytes():
        library_publish(path, rows)
    elif path.read_bytes() != as_bytes(rows):
        raise ValueError(path.name)


# ----------------------------------------------------------------------------------------------------------------- read


def _read(path, text, cut=None):
    lines = cut(text) if cut else text.split("\n")
    rest = lines.pop() if not cut else ""
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            raise ValueError(f"{path.name}: line {number}") from None
    if rest:
        raise ValueError(f"{path.name}: line {len(lines) + 1}")
    return rows


def read__splitlines(path):
    """str.splitlines cuts at U+2028"""
    return _read(path, path.read_text(encoding="utf-8"), str.splitlines)


def read__last_newline_not_needed(path):
    """a last line without its newline"""
    return _read(path, path.read_text(encoding="utf-8").rstrip("\n"), lambda text: text.split("\n") if text else [])


def read__damage_skipped(path):
    """not skipped"""
    rows = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def read__torn_line_ignored(path):
    """a torn last line is damage"""
    return _read(path, path.read_text(encoding="utf-8").rpartition("\n")[0] + "\n" if path.stat().st_size else "")


def read__missing_file_is_empty(path):
    """is a FileNotFoundError"""
    return read(path) if path.exists() else []


def read__temporary_file(path):
    """nobody reads a .tmp"""
    return read(path if path.exists() else path.with_name(path.name + ".tmp"))


def read__encoding_of_the_machine(path):
    """whatever the machine's encoding is"""
    return _read(path, path.read_text())


def read__error_without_a_place(path):
    """should name the file and line"""
    *lines, rest = path.read_text(encoding="utf-8").split("\n")
    if rest:
        raise ValueError("torn")
    return [json.loads(line) for line in lines]


def read__lines_counted_from_zero(path):
    """the file and line 2"""
    try:
        return read(path)
    except ValueError as error:
        number = str(error).split("line ")[-1].split()[0]
        raise ValueError(f"{path.name}: line {int(number) - 1}") from None


def read__foreign_bytes_replaced(path):
    """text that is not UTF-8 is damage"""
    return _read(path, path.read_text(encoding="utf-8", errors="replace"))


def read__empty_lines_skipped(path):
    """an empty line"""
    text = path.read_text(encoding="utf-8")
    if text.endswith("\n"):
        text = "\n".join(line for line in text.split("\n") if line) + "\n"
    return _read(path, text)


# ------------------------------------------------------------------------------------------------------------- add_line


def add_line__appended(path, row):
    """changed in place"""
    with open(path, "a", encoding="utf-8") as file:
        file.write(_text([row]))


def add_line__appended_in_two_writes(path, row):
    """changed in place"""
    with open(path, "a", encoding="utf-8", buffering=1) as file:
        file.write(json.dumps(row, ensure_ascii=False))
        file.flush()
        file.write("\n")


def add_line__rewritten_in_place(path, row):
    """changed in place"""
    rows = [old for old in (library_read(path) if path.exists() else []) if old["step"] != row["step"]]
    path.write_bytes(as_bytes([*rows, row]))


def add_line__removed_first(path, row):
    """no file at all"""
    rows = [old for old in (library_read(path) if path.exists() else []) if old["step"] != row["step"]]
    path.unlink(missing_ok=True)
    library_publish(path, [*rows, row])


def add_line__repeated_step_twice(path, row):
    """one line a step"""
    library_publish(path, [*(library_read(path) if path.exists() else []), row])


def add_line__later_steps_dropped(path, row):
    """the lines of the other steps must stay"""
    rows = [old for old in (library_read(path) if path.exists() else []) if old["step"] < row["step"]]
    library_publish(path, [*rows, row])


def add_line__only_the_last(path, row):
    """the lines of the other steps must stay"""
    library_publish(path, [row])


def add_line__published_once(path, row):
    """was published by an earlier attempt"""
    library_publish_once(path, [*(library_read(path) if path.exists() else []), row])


def add_line__not_fsynced(path, row):
    """power failure"""
    rows = [old for old in (library_read(path) if path.exists() else []) if old["step"] != row["step"]]
    _temporary(path).write_bytes(as_bytes([*rows, row]))
    os.replace(_temporary(path), path)


# ---------------------------------------------------------------------------------------------------------------- steps


def _found(root, role, pattern="step-??????.jsonl"):
    return {int(path.name[5:11]) for path in (root / role).glob(pattern)}


def steps__either_role(root):
    """published by one role only"""
    return sorted(_found(root, "planner") | _found(root, "executor"))


def steps__one_role(root):
    """published by one role only"""
    return sorted(_found(root, "planner"))


def steps__temporary_files(root):
    """a .tmp is not published"""
    pattern = "step-??????.jsonl*"
    return sorted(_found(root, "planner", pattern) & _found(root, "executor", pattern))


def steps__up_to_the_last(root):
    """the steps that are there"""
    return list(range(1, max(steps(root), default=0) + 1))


def steps__other_files(root):
    """nothing made of other files"""
    names = [{path.name for path in (root / role).glob("step-*.jsonl")} for role in ("planner", "executor")]
    either = sorted(int(name.removeprefix("step-").removesuffix(".jsonl")) for name in names[0] | names[1])
    return [step for step in either if f"step-{step:06d}.jsonl" in names[0] & names[1]]


def steps__numbers_as_text(root):
    """[1, 2], not"""
    return [f"{step:06d}" for step in steps(root)]


def steps__no_folders_yet(root):
    """before the first step there are no folders"""
    names = [{path.name for path in (root / role).iterdir()} for role in ("planner", "executor")]
    return [step for step in steps(root) if f"step-{step:06d}.jsonl" in names[0]]


# ------------------------------------------------------------------------------------------------------------------ run


def _rows(root, step):
    return root / f"step-{step:06d}.jsonl"


def _checkpoint(root, step):
    return root / f"checkpoint-{step:06d}.jsonl"


def _newest(root, pattern="checkpoint-??????.jsonl"):
    return max((int(path.name.split("-")[1][:6]) for path in root.glob(pattern)), default=0)


def _resumed(root, state):
    done = _newest(root)
    return (done, library_read(_checkpoint(root, done))[0]) if done else (0, state)


def _step(root, step, play, learn, state):
    if not _rows(root, step).exists():
        library_publish_once(_rows(root, step), play(step, state))
    state = learn(state, library_read(_rows(root, step)))
    library_publish_once(_checkpoint(root, step), [state])
    return state


def run__from_the_beginning(root, steps, play, learn, state):
    """have a checkpoint and were learned again"""
    for step in range(1, steps + 1):
        state = _step(root, step, play, learn, state)
    return state


def run__last_step_learned_again(root, steps, play, learn, state):
    """rows were trained twice"""
    done, state = _resumed(root, state)
    for step in range(max(1, done), steps + 1):
        if not _rows(root, step).exists():
            library_publish_once(_rows(root, step), play(step, state))
        state = learn(state, library_read(_rows(root, step)))
        library_publish(_checkpoint(root, step), [state])
    return state


def run__behind_the_last_published_step(root, steps, play, learn, state):
    """published rows were never trained"""
    _, state = _resumed(root, state)
    for step in range(_newest(root, "step-??????.jsonl") + 1, steps + 1):
        state = _step(root, step, play, learn, state)
    for step in range(1, steps + 1):
        if not _checkpoint(root, step).exists():
            library_publish_once(_checkpoint(root, step), [state])
    return state


def run__checkpoint_not_loaded(root, steps, play, learn, state):
    """returns the same state"""
    for step in range(_newest(root) + 1, steps + 1):
        state = _step(root, step, play, learn, state)
    return state


def run__played_again(root, steps, play, learn, state):
    """were played again"""
    done, state = _resumed(root, state)
    for step in range(done + 1, steps + 1):
        rows = play(step, state)
        if not _rows(root, step).exists():
            library_publish_once(_rows(root, step), rows)
        state = learn(state, library_read(_rows(root, step)))
        library_publish_once(_checkpoint(root, step), [state])
    return state


def run__played_again_and_published(root, steps, play, learn, state):
    """it cannot go on"""
    done, state = _resumed(root, state)
    for step in range(done + 1, steps + 1):
        library_publish_once(_rows(root, step), play(step, state))
        state = learn(state, library_read(_rows(root, step)))
        library_publish_once(_checkpoint(root, step), [state])
    return state


def run__published_rows_replaced(root, steps, play, learn, state):
    """were played again"""
    done, state = _resumed(root, state)
    for step in range(done + 1, steps + 1):
        rows = play(step, state)
        library_publish(_rows(root, step), rows)
        state = learn(state, rows)
        library_publish_once(_checkpoint(root, step), [state])
    return state


def run__checkpoint_before_the_rows(root, steps, play, learn, state):
    """every step publishes its rows"""
    done, state = _resumed(root, state)
    for step in range(done + 1, steps + 1):
        rows = play(step, state) if not _rows(root, step).exists() else library_read(_rows(root, step))
        state = learn(state, rows)
        library_publish_once(_checkpoint(root, step), [state])
        library_publish_once(_rows(root, step), rows)
    return state


def run__checkpoint_before_learning(root, steps, play, learn, state):
    """the last checkpoint is not the state"""
    done, state = _resumed(root, state)
    for step in range(done + 1, steps + 1):
        if not _rows(root, step).exists():
            library_publish_once(_rows(root, step), play(step, state))
        library_publish_once(_checkpoint(root, step), [state])
        state = learn(state, library_read(_rows(root, step)))
    return state


def run__checkpoint_in_place(root, steps, play, learn, state):
    """it cannot go on"""
    done, state = _resumed(root, state)
    for step in range(done + 1, steps + 1):
        if not _rows(root, step).exists():
            library_publish_once(_rows(root, step), play(step, state))
        state = learn(state, library_read(_rows(root, step)))
        _checkpoint(root, step).write_text(json.dumps(state) + "\n", encoding="utf-8")
    return state


def run__unfinished_checkpoint(root, steps, play, learn, state):
    """it cannot go on"""
    done = _newest(root, "checkpoint-*")
    if done:
        [state] = library_read(_checkpoint(root, done))
    for step in range(done + 1, steps + 1):
        state = _step(root, step, play, learn, state)
    return state


def run__checkpoint_at_the_end_only(root, steps, play, learn, state):
    """every step publishes its rows and its checkpoint"""
    done, state = _resumed(root, state)
    for step in range(done + 1, steps + 1):
        if not _rows(root, step).exists():
            library_publish_once(_rows(root, step), play(step, state))
        state = learn(state, library_read(_rows(root, step)))
    if steps > done:
        library_publish_once(_checkpoint(root, steps), [state])
    return state


def run__all_played_first(root, steps, play, learn, state):
    """were played with another state"""
    done, state = _resumed(root, state)
    for step in range(done + 1, steps + 1):
        if not _rows(root, step).exists():
            library_publish_once(_rows(root, step), play(step, state))
    for step in range(done + 1, steps + 1):
        state = _step(root, step, play, learn, state)
    return state


def run__finished_returns_nothing(root, steps, play, learn, state):
    """returns the same state"""
    done, state = _resumed(root, state)
    if done >= steps > 0:
        return None
    for step in range(done + 1, steps + 1):
        state = _step(root, step, play, learn, state)
    return state
