"""train: corpora, tokens and the loader.

1. Corpora    a file, a folder or the standard library -> documents in pieces, in bounded memory
2. Tokens     documents -> ids in a memory-mapped file, kept in a cache under the content's digest
3. Loader     the batch of update n, a pure function of n
"""
import codecs
import hashlib
import json
import os
import shutil
import struct
import sys
import sysconfig
import tempfile
import typing

import numpy as np
import tqdm

import xtrain
from xtrain import Refused, say

# ---- Corpora -------------------------------------------------------------------------------------
# A corpus is a list of files.  A .jsonl file has one document a line, the "text" of an object; any
# other file is text, split into documents at <|endoftext|>.  Nothing is stripped, line ends stay,
# but a byte-order mark and documents of white space alone are left out.

ENDINGS = (".txt", ".md", ".py", ".jsonl")      # what is taken from a folder
BLOCK = 1 << 20                                 # bytes read at once


def files_below(folder, endings=ENDINGS, skip=lambda name: False):
    """The files of a folder and its subfolders with one of the endings, in sorted order.

    Names that begin with a dot are left out, folders that `skip` names too; links to folders are
    not followed (they may be loops).
    """
    def refuse(e):
        raise Refused(f"--data {e.filename}: cannot be read ({e.strerror})") from None

    found = []
    for at, folders, names in os.walk(folder, onerror=refuse):
        # by name in every folder: the order of documents may not depend on the file system
        folders[:] = sorted(f for f in folders if not f.startswith(".") and not skip(f))
        found += [os.path.join(at, name) for name in sorted(names)
                  if name.lower().endswith(endings) and not name.startswith(".")]
    return found


def standard_library():
    """The .py files of the running Python's standard library: the corpus that is always there.

    Without its tests, and without what is installed into it (site-packages lies inside).
    """
    def skip(name):
        return (name in ("site-packages", "dist-packages", "test", "tests", "__pycache__")
                or name.endswith("_test"))
    return files_below(sysconfig.get_path("stdlib"), (".py",), skip)


def corpus_files(path):
    """The files of `--data`: a file of any ending, or a folder's; None is the standard library."""
    if path is None:
        files, path = standard_library(), sysconfig.get_path("stdlib")
    elif os.path.isdir(path):
        files = files_below(path)
    elif os.path.isfile(path):
        files = [path]
    else:
        what = "neither a file nor a folder" if os.path.exists(path) else "no such file or folder"
        raise Refused(f"--data {path}: {what}")
    if not files:
        raise Refused(f"--data {path}: the folder has no file that ends in {', '.join(ENDINGS)}; "
                      "name the file itself, or rename it")
    return files


class Corpus:
    """The documents of files, read as a stream as often as wanted.  Refused for bad input."""

    def __init__(self, path=None, encoding="utf-8", errors="strict", progress=True):
        self.name = "the standard library" if path is None else f"--data {path}"
        self.files, self.progress = corpus_files(path), progress
        # old sources in some library may be Latin-1, and nobody could mend that
        self.encoding, self.errors = encoding, "replace" if path is None else errors
        check_encoding(encoding, errors)
        self.size = sum(file_size(file) for file in self.files)
        if not self.size:
            raise Refused(f"{self.name}: the corpus is empty (0 bytes in {len(self.files)} files)")

    def bar(self, what):
        """A progress bar over the bytes of all files; in a log it moves every ten seconds only."""
        return tqdm.tqdm(total=self.size, desc=what, unit="B", unit_scale=True, leave=False,
                         disable=not self.progress, mininterval=0.2 if sys.stderr.isatty() else 10)

    def digest(self):
        """SHA-256 (hex) of what the documents are made of: contents in order, encoding, errors."""
        how = (self.encoding, self.errors, xtrain.PIECE, xtrain.LONGEST)
        total = hashlib.sha256(repr(how).encode())
        with self.bar("reading") as bar:
            for file in self.files:
                content = hashlib.sha256()
                for block in read_blocks(file):
                    content.update(block)
                    bar.update(len(block))
                # a digest a file: where one ends and the next begins counts too
                total.update(content.digest() + bytes([is_jsonl(file)]))
        return total.hexdigest()

    def pieces(self, what):
        """Yield (text, ends a document) of all files; `what` labels the progress bar."""
        empty = True
        with self.bar(what) as bar:
            for file in self.files:
                blocks = read_text(file, self.encoding, self.errors, bar)
                documents = (read_jsonl(file, blocks, self.errors) if is_jsonl(file)
                             else xtrain.pieces(blocks))
                for piece in documents:
                    empty = False
                    yield piece
        if empty:
            raise Refused(f"{self.name}: the corpus is empty (only white space and "
                          f"{xtrain.END_OF_TEXT} in {self.size} bytes)")


def file_size(file):
    """Bytes of a file; Refused for what would fail, or wait for ever, when it is read."""
    try:
        if os.path.exists(file) and not os.path.isfile(file):
            raise Refused(f"{file}: not a regular file; take it out of the folder")
        return os.path.getsize(file)
    except OSError as e:
        raise Refused(f"{file}: cannot be read ({e.strerror})") from None


def is_jsonl(file):
    return file.lower().endswith(".jsonl")


def check_encoding(encoding, errors):
    """Refused unless both can be used."""
    try:
        b" ".decode(encoding)
    except UnicodeError:
        pass                        # two bytes a character, for example
    except LookupError:
        raise Refused(f"--encoding {encoding!r}: no text encoding that Python knows; "
                      "utf-8, latin-1, cp1252, utf-16 and gb18030 are some") from None
    if errors not in ("strict", "replace", "ignore"):
        raise Refused(f"--errors {errors!r}: give strict, replace or ignore")


def read_blocks(file):
    """Yield the bytes of a file, a block at a time."""
    try:
        with open(file, "rb") as f:
            while block := f.read(BLOCK):
                yield block
    except OSError as e:
        raise Refused(f"{file}: cannot be read ({e.strerror})") from None


def read_text(file, encoding, errors, bar):
    """Yield the text of a file, a block at a time; Refused names the byte that does not decode."""
    decoder, done = codecs.getincrementaldecoder(encoding)(errors), 0
    blocks = read_blocks(file)
    while True:
        block = next(blocks, b"")
        done += len(block)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeError as e:
            # the decoder may have held back some bytes of the block before
            at = done - len(e.object) + e.start if isinstance(e, UnicodeDecodeError) else done
            raise Refused(f"{file}: not {encoding} at byte {at}; give --encoding (latin-1, "
                          "cp1252, utf-16, ...), or --errors replace") from None
        bar.update(len(block))
        # a byte-order mark can only be at the very start
        yield text.removeprefix("\ufeff") if done == len(block) else text
        if not block:
            return


def lines_of(blocks):
    """Yield the lines of text that comes in blocks; only a line feed ends one."""
    rest = []                       # of a line that is longer than a block
    for block in blocks:
        first, *more = block.split("\n")
        rest.append(first)
        if more:
            yield "".join(rest)
            yield from more[:-1]
            rest = [more[-1]]
    yield "".join(rest)


def read_jsonl(file, blocks, errors):
    """Yield the pieces of a .jsonl file's documents; Refused names the line that is broken.

    <|endoftext|> inside a document is text like any other.
    """
    for number, line in enumerate(lines_of(blocks), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            # "\ud800" is good JSON, but no text
            text = text.encode("utf-8", errors).decode()
        except UnicodeEncodeError as e:
            raise Refused(f"{file}: line {number}: {text[e.start]!a} is half a surrogate pair; "
                          "mend it, or give --errors replace") from None
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as e:
            raise Refused(f"{file}: line {number}: not a JSON object with a string \"text\" "
                          f"({type(e).__name__}: {xtrain.one_line(e)[:100]})") from None
        yield from xtrain.pieces([text], None)


# ---- Tokens --------------------------------------------------------------------------------------
# A folder of the cache holds a tokenizer and its tokens.bin: a header of 72 bytes, the training
# tokens, the held-out tokens, all little-endian.  The folder's name is the digest of the content
# and the tokenizer asked for: other data never meets an old file, equal data always does.

HEADER = struct.Struct("<8sIIQQQ32s")   # magic, version, itemsize, three counts, SHA-256
MAGIC, VERSION = b"xtraintk", 1
HELD_OUT = 20                           # one document in 20, or the last 20th of the tokens


class Tokens(typing.NamedTuple):
    """The ids of a corpus.  Each document ends in end of text."""
    train: np.ndarray       # u16 or u32 [n], memory-mapped, read-only
    held_out: np.ndarray    # of the same kind: documents that `train` has not
    documents: int          # in both
    digest: str             # SHA-256 (hex) of tokenizer, split and ids: "is this the same data?"
    folder: str             # where tokens.bin and the tokenizer's files lie
    keep: object = None     # holds a temporary folder that goes away with this


def prepare(path=None, tokenizer="bpe:4096", encoding="utf-8", errors="strict", progress=True):
    """The corpus `path` in ids -> (Tokenizer, Tokens); from the cache if it has been made before.

    path: a file, a folder, or None for the standard library (see corpus_files).  tokenizer: what
    `--tokenizer` takes, or a Tokenizer.  The cache is $XTRAIN_CACHE, else ~/.cache/xtrain; if it
    cannot be written, a temporary folder is used and that is said.  Refused for bad input.
    """
    if isinstance(tokenizer, str):
        xtrain.Tokenizer.parse(tokenizer)       # a wrong flag should not wait for a long read
    corpus = Corpus(path, encoding, errors, progress)
    asked = tokenizer if isinstance(tokenizer, str) else tokenizer.digest
    key = hashlib.sha256(f"{VERSION} {corpus.digest()} {asked}".encode()).hexdigest()
    folder = os.path.join(cache_root(), key[:32])
    if os.path.isdir(folder):
        try:
            return open_tokens(folder)
        except (Refused, OSError) as e:
            say(f"cache: {e}; making it again")
    return make_tokens(folder, corpus, tokenizer)


def cache_root():
    """The folder that tokens are kept in; it may be deleted whenever no run is reading it."""
    return os.environ.get("XTRAIN_CACHE") or os.path.expanduser("~/.cache/xtrain")


def working_folder(root):
    """A new folder to write in -> (its path, None), or (path, what removes it) outside `root`."""
    try:
        os.makedirs(root, exist_ok=True)
        # begins with a dot, in the cache itself: renaming works inside one file system only
        return tempfile.mkdtemp(prefix=".unfinished-", dir=root), None
    except OSError as e:
        temporary = tempfile.TemporaryDirectory(prefix="xtrain-")
        say(f"cache {root}: cannot be written ({e.strerror}); tokens go to {temporary.name} for "
            "this run, set XTRAIN_CACHE to keep them")
        return temporary.name, temporary


def make_tokens(folder, corpus, tokenizer):
    """Make tokenizer and tokens beside `folder`, then rename: what has the name is whole."""
    work, temporary = working_folder(os.path.dirname(folder))
    try:
        if isinstance(tokenizer, str):
            texts = (text for text, _ in corpus.pieces("learning " + tokenizer))
            tokenizer = xtrain.Tokenizer.make(tokenizer, texts)
        tokenizer.save(work)
        write_tokens(work, tokenizer, corpus.pieces("tokenizing"))
        if temporary:
            return open_tokens(work, temporary)
        for name in os.listdir(work):
            sync(os.path.join(work, name))
        shutil.rmtree(folder, ignore_errors=True)       # a damaged one
        try:
            os.rename(work, folder)
        except OSError:
            if not os.path.isdir(folder):               # else another process was faster
                raise
        sync(os.path.dirname(folder))
        return open_tokens(folder)
    finally:
        if not temporary:
            shutil.rmtree(work, ignore_errors=True)


def sync(path):
    """Wait until a file, or a folder's list of names, is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def held_out(text):
    """Is the document that begins with this piece held out?  One in 20, by its content alone."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little") % HELD_OUT == 0


def write_tokens(folder, tokenizer, texts):
    """Encode texts (what `pieces` yields) into folder/tokens.bin.

    Held-out documents come after the others.  Where the hash held out nothing, or more than a
    quarter (few documents), the last 5 % of the tokens are held out instead, at least two.
    """
    kind = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    path, counts, documents, first = os.path.join(folder, "tokens.bin"), [0, 0], 0, True
    with open(path, "w+b") as f, tempfile.TemporaryFile(dir=folder) as held:
        f.write(bytes(HEADER.size))
        for ids, text, ends in tokenizer.stream(texts):
            side = held_out(text) if first else side
            (f, held)[side].write(ids.astype(kind).data)
            counts[side] += len(ids)
            documents, first = documents + ends, ends
        held.seek(0)
        shutil.copyfileobj(held, f)
        total = sum(counts)
        if total < 4:
            raise Refused(f"--data: {total} tokens with end of text are too few to train on and "
                          "hold some out")
        if not 0 < counts[1] <= total/4 or counts[1] < 2:
            counts[1] = max(2, total//HELD_OUT)
        counts = [total - counts[1], counts[1], documents]
        f.seek(0)
        f.write(HEADER.pack(MAGIC, VERSION, kind.itemsize, *counts,
                            digest_of(f, tokenizer, counts)))


def digest_of(f, tokenizer, counts):
    """SHA-256 of the tokenizer, the counts and the tokens in the open file; goes back to 0."""
    total = hashlib.sha256(f"{tokenizer.digest} {list(counts)}".encode())
    f.seek(HEADER.size)
    while block := f.read(BLOCK):
        total.update(block)
    f.seek(0)
    return total.digest()


def open_tokens(folder, keep=None):
    """Map a folder that make_tokens wrote -> (Tokenizer, Tokens); Refused if it is damaged.

    Every byte is read once to compare digests, a second for 800 MB: a wrong token would train on.
    """
    tokenizer = xtrain.Tokenizer.load(folder)
    path = os.path.join(folder, "tokens.bin")
    with open(path, "rb") as f:
        header = f.read(HEADER.size)
        if len(header) < HEADER.size:
            raise Refused(f"{path}: cut off")
        magic, version, itemsize, *counts, digest = HEADER.unpack(header)
        if (magic, version) != (MAGIC, VERSION) or itemsize not in (2, 4):
            raise Refused(f"{path}: not a file of tokens of version {VERSION}")
        if digest != digest_of(f, tokenizer, counts):
            raise Refused(f"{path}: damaged (its digest does not match)")
    train, held, documents = counts
    ids = np.memmap(path, f"<u{itemsize}", "r", HEADER.size, (train + held,))
    return tokenizer, Tokens(ids[:train], ids[train:], documents, digest.hex(), folder, keep)


# ---- Loader --------------------------------------------------------------------------------------

class Micro(typing.NamedTuple):
    """What Step.micro takes: one micro-step of one rank."""
    tokens: np.ndarray      # int64 [batch, seq]
    targets: np.ndarray     # int64 [batch, seq]: the token after each; -1 is not counted
    order: np.ndarray       # int64 [batch*seq]: stable argsort of the flattened tokens
    first_sequence: int     # number of row 0 in the whole run, from 0


class Loader:
    """The batch of any update, as a pure function of its number: no state, nothing to save.

    Sequences are numbered through the whole run.  Update n (from 1) takes `sequences` of them:
    rank r's are the r-th consecutive share, in micro-steps of `batch`, so that the global batch is
    the same in the same order however accum*batch*ranks is split up.  An epoch is all windows in
    an order of its own; it may end inside a batch.  A window is seq + 1 tokens and begins at a
    multiple of seq plus an offset of the epoch, so that what is cut differs from epoch to epoch.
    """

    def __init__(self, tokens, seq, batch, accum=1, seed=0, rank=0, ranks=1):
        """tokens: int array [n], not copied.  Refused if it has no window of seq + 1."""
        n = len(tokens)
        if n < seq + 1:
            raise Refused(f"--seq {seq}: one sequence needs {seq + 1} tokens, the training part of "
                          f"the corpus has {n}; give a smaller --seq or more text")
        self.tokens, self.seq, self.batch, self.accum = tokens, seq, batch, accum
        self.seed, self.rank, self.sequences = seed, rank, accum*batch*ranks
        self.windows = max(1, n//seq - 1)                       # in an epoch
        self.epoch_steps = -(-self.windows//self.sequences)     # updates until all were seen
        self.epochs = {}                                        # the last two orders

    def epoch(self, e):
        """(order of the windows, offset) of epoch e.

        From the raw words of Philox keyed by (seed, e): those are promised to stay what they are,
        Generator.permutation is not.
        """
        if e not in self.epochs:
            key = np.array([self.seed % 2**64, e], np.uint64)
            words = np.random.Philox(key=key).random_raw(self.windows + 1)
            room = min(len(self.tokens) - 1 - self.windows*self.seq, self.seq - 1)
            last = {k: v for k, v in self.epochs.items() if k == e - 1}
            self.epochs = last | {e: (np.argsort(words[1:], kind="stable"),
                                      int(words[0] % np.uint64(room + 1)))}
        return self.epochs[e]

    def window(self, number):
        """Sequence `number` of the run: int64 [seq + 1]."""
        e, i = divmod(number, self.windows)
        order, offset = self.epoch(e)
        start = offset + int(order[i])*self.seq
        return self.tokens[start:start + self.seq + 1].astype(np.int64)

    def step(self, n):
        """Update n, from 1 -> ([Micro] of this rank, counted targets of the whole global batch)."""
        first = (n - 1)*self.sequences + self.rank*self.accum*self.batch
        micros = []
        for number in range(first, first + self.accum*self.batch, self.batch):
            rows = np.stack([self.window(number + i) for i in range(self.batch)])
            tokens, targets = rows[:, :-1].copy(), rows[:, 1:].copy()
            order = np.argsort(tokens, axis=None, kind="stable")
            micros.append(Micro(tokens, targets, order, number))
        return micros, self.sequences*self.seq      # every target of these windows counts
