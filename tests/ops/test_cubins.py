"""The cache of compiled CUDA kernels: what is in it was put there by this user, and is whole."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvd_deepreduce.ops import cubins, device

FILE = "bits/bits"


class Library:
    """What ``device`` uses of CuPy. A "cubin" is the source; ``compiled`` lists the options of each compilation."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, ...]] = []
        self.refused: set[bytes] = set()
        library = self

        class Module:
            def load(self, cubin: bytes) -> None:
                if cubin in library.refused:
                    raise RuntimeError("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid")
                self.cubin = cubin

        self.cuda = SimpleNamespace(
            Device=lambda: SimpleNamespace(compute_capability="90"),
            nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
            function=SimpleNamespace(Module=Module),
            compiler=SimpleNamespace(compile_using_nvrtc=self._compile),
        )

    def _compile(self, text: str, options: tuple[str, ...], architecture: None, file: str) -> tuple[bytes, None]:
        self.compiled.append(options)
        return text.encode(), None

    def module(self, file: str = FILE) -> None:
        """Asks for a module, which must be that of the file."""
        assert device._module(self, file).cubin == device.source(f"{file}.cu").encode()


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels" / "hvd_deepreduce"


def kept(folder: Path) -> Path:
    """The only file in the cache."""
    (file,) = folder.iterdir()
    return file


def test_kernels_are_compiled_once_and_with_our_options_alone(folder):
    """``RawModule(code=...)`` would add -ftz=true, which flushes denormals."""
    xp = Library()
    for _ in range(2):
        xp.module()
    assert xp.compiled == [device.OPTIONS] and "--ftz=false" in device.OPTIONS
    assert folder.stat().st_mode & 0o777 == 0o700 and kept(folder).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["a bit", "the end", "everything", "another kernel"])
def test_a_damaged_cubin_is_compiled_again(folder, damage):
    xp = Library()
    xp.module()
    file = kept(folder)
    data = bytearray(file.read_bytes())
    if damage == "a bit":
        data[100] ^= 1
    elif damage == "the end":
        del data[-1]
    elif damage == "everything":
        data.clear()
    else:
        xp.module("rle/rle")
        (other,) = set(folder.iterdir()) - {file}
        data[:] = other.read_bytes()  # whole, with its digest
        other.unlink()
    file.write_bytes(data)
    before = len(xp.compiled)
    xp.module()
    xp.module()
    assert len(xp.compiled) == before + 1, "it was not compiled again, or not kept"


def test_a_cubin_that_the_driver_refuses_is_compiled_again(folder):
    xp = Library()
    xp.module()
    (key,) = (path.stem for path in folder.iterdir())
    cubins.write(key, b"of another driver")
    xp.refused.add(b"of another driver")
    xp.module()
    xp.module()
    assert len(xp.compiled) == 2


def test_a_user_without_a_home_folder_has_no_cache_unless_one_is_named(folder, monkeypatch, tmp_path):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # of no account
    monkeypatch.chdir(tmp_path)
    Library().module()
    assert kept(folder)
    for name in ("", None):
        if name is None:
            monkeypatch.delenv("CUPY_CACHE_DIR")
        else:
            monkeypatch.setenv("CUPY_CACHE_DIR", name)
        xp = Library()
        for _ in range(2):
            with pytest.warns(RuntimeWarning, match="this user has no home folder.*set CUPY_CACHE_DIR"):
                xp.module()
        assert len(xp.compiled) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["kernels"]


def test_an_empty_name_of_the_cache_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUPY_CACHE_DIR", "")
    assert cubins.cache_folder() == tmp_path / ".cupy" / "kernel_cache" / "hvd_deepreduce"


def test_an_old_cupy_is_refused(monkeypatch):
    """It takes no stream of another library."""
    device._cupy.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(__version__="13.6.0"))
    with pytest.raises(ImportError, match="need CuPy 14, and this is 13.6.0: run pip install 'cupy-cuda12x"):
        device.array_module(None)
    new = SimpleNamespace(__version__="14.0.0rc1")
    monkeypatch.setitem(sys.modules, "cupy", new)
    assert device.array_module(None) is new
    device._cupy.cache_clear()


def planted(folder: Path) -> Library:
    """A cache that holds a cubin with a right digest, which would run if it were loaded."""
    xp = Library()
    xp.module()
    cubins.write(kept(folder).stem, b"planted")
    return xp


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
@pytest.mark.parametrize("what", ["the folder", "the file"])
def test_what_others_can_write_is_refused(folder, what, mode):
    xp = planted(folder)
    (folder if what == "the folder" else kept(folder)).chmod(mode)
    with pytest.warns(RuntimeWarning, match=f"{what} has mode {mode:o}, so others can write to it") as said:
        xp.module()
    assert len(xp.compiled) == 2 and str(folder) in str(said[0].message)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("what", ["the folder", "the file"])
def test_what_belongs_to_another_user_is_refused(folder, what):
    xp = planted(folder)
    os.chown(folder if what == "the folder" else kept(folder), 12345, -1)
    with pytest.warns(RuntimeWarning, match=f"{what} belongs to the user with the number 12345"):
        xp.module()
    assert len(xp.compiled) == 2


def test_a_link_is_refused(folder, tmp_path):
    """To a folder of another user's choice, where this user may have written other things."""
    xp = planted(folder)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning, match="are not kept in"):
        xp.module()
    assert len(xp.compiled) == 2


def test_a_cache_that_cannot_be_written_does_not_stop_the_job(tmp_path, monkeypatch):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "a file"))
    xp = Library()
    with pytest.warns(RuntimeWarning, match="are compiled in every process: .*set CUPY_CACHE_DIR"):
        xp.module()
    assert len(xp.compiled) == 1


def test_a_write_that_fails_leaves_nothing(folder, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        cubins.write("00", b"cubin")
    assert not list(folder.iterdir())


def test_an_empty_cache_is_no_reason_for_a_warning(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cubins.read("00") is None
