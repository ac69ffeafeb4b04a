"""What happens to files that a program has left: every kind of damage that a cache must survive."""


def _cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _replace_by_a_folder(path):
    path.unlink()
    path.mkdir()


DAMAGES = {
    "emptied": lambda path: path.write_bytes(b""),
    "cut": _cut,
    "a flipped bit": _flip,
    "gone": lambda path: path.unlink(),
    "a folder": _replace_by_a_folder,
}
