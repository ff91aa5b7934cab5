"""train: the command line that trains a language model.

    python train.py --flash --kv-heads 2 --accum-steps 4            Python's own library, minutes
    python train.py --data book.txt --preset v1 --steps 2000        your text (file, folder, .jsonl)
    python train.py --resume runs/laptop-1 --steps 800              go on where a run stopped
    python train.py --bench 20 --preset v3                          how fast is this machine?
    python train.py --config small.toml --lr 2e-3                   settings from a file; flags win

How it reads, top to bottom:

1. Settings     one dataclass: every flag with its help, unit, limits and default
2. Corpora      where text comes from: the standard library, a file, a folder, .txt, .jsonl
3. Tokens       the corpus as numbers in a memory-mapped file, cached by content
4. Loader       which sequences a step gets: a pure function of (seed, step)
5. Run          model, optimizer, data and folder, new or resumed; one update; one checkpoint
6. Logs         banner, progress, metrics.jsonl, the loss picture
7. Loop         updates, evaluations, checkpoints, until the steps, the time or a signal end it
8. Bench        timed steps on random tokens
9. Start        from the command line to one of these

What a run writes (runs/<preset>-<n>, or --out): settings.json, metrics.jsonl, loss.png, best.json
and checkpoints step-00000100/, each a Hugging Face folder that transformers and sample.py open.
"""
import codecs
import contextlib
import dataclasses
import errno
import fcntl
import gc
import hashlib
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import struct
import sys
import sysconfig
import tempfile
import time
import traceback
import typing

import numpy as np
import tqdm

try:
    import xtrain
except ImportError as e:        # the core is not built, or XTRAIN_ISA names one that cannot run
    if __name__ != "__main__":
        raise
    print(f"xtrain: error: {e}", file=sys.stderr)
    sys.exit(2)
from xtrain import Refused, say, setting

# ---- 1. Settings ---------------------------------------------------------------------------------
# A field is a flag: its name (kv_heads is --kv-heads), its default, its help, its unit, its limits.
# `xtrain.parse` hands over only what was given, so that four sources can be laid over each other:
# the defaults here, what a resumed run was started with, a --config file, the command line.

DATA, MODEL, BATCH, OPTIMIZER = "data", "model", "length and batch", "optimizer"
MACHINE, RUN, CHECKS = "machine", "run folder and checkpoints", "evaluation and checks"


@dataclasses.dataclass
class Settings:
    """Every flag of train.py.  None means: worked out from the others, as the help says."""
    data: str = setting(None, "text to train on: a file, a folder, .txt or .jsonl (default: the "
                        "standard library of this Python)", "path", DATA)
    tokenizer: str = setting("bpe:4096", "bpe:N learns N ids from the corpus; or gpt2, bytes",
                             "", DATA)
    encoding: str = setting("utf-8", "how the text files are encoded", "", DATA)
    errors: str = setting("strict", "bytes that are not text: stop, or put a replacement character",
                          "", DATA, choices=("strict", "replace"))

    # None here is "as the preset has it"; a stored run keeps what came of it
    preset: str = setting("laptop", "sizes by name; flags below beat it", "", MODEL,
                          choices=tuple(xtrain.PRESETS))
    dim: int = setting(None, "width of the residual stream (preset's)", "", MODEL, least=1)
    layers: int = setting(None, "number of blocks (preset's)", "", MODEL, least=1, most=10**4)
    heads: int = setting(None, "query heads (preset's)", "", MODEL, least=1)
    kv_heads: int = setting(None, "key and value heads, a divisor of heads (heads)", "", MODEL,
                            least=1)
    head_dim: int = setting(None, "width of a head, even (dim / heads)", "", MODEL, least=1)
    ffn: int = setting(None, "inner width of SwiGLU (8/3 dim, rounded up to 64)", "", MODEL,
                       least=1)
    vocab_size: int = setting(None, "ids, more than the tokenizer has is padding (tokenizer's)",
                              "", MODEL, least=1)
    tie_embeddings: bool = setting(None, "one matrix for embedding and head (preset's)", "", MODEL)
    qk_norm: bool = setting(None, "RMSNorm on q and k: Qwen3; without, Llama (on)", "", MODEL)
    dropout: float = setting(0.0, "on the two residual branches of a block", "", MODEL,
                             least=0, below=1)
    init_from: str = setting(None, "start from the weights of a Hugging Face folder", "path", MODEL)

    # many short sequences a step learn faster than few long ones while models are small (LOG.md)
    seq: int = setting(128, "length of a training sequence", "tokens", BATCH, least=1)
    batch: int = setting(4, "sequences of one micro-step", "sequences", BATCH, least=1,
                         most=10**6)
    accum_steps: int = setting(1, "micro-steps whose gradients add up to one update", "", BATCH,
                               least=1, most=10**9)
    steps: int = setting(300, "updates in all, those before --resume included", "", BATCH, least=1,
                         most=10**9)
    max_minutes: float = setting(None, "stop, saved, after this long", "minutes", BATCH, above=0)

    # torch's AdamW; eps is 1e-8, and clipping multiplies by min(1, c/(norm + 1e-6))
    lr: float = setting(None, "highest learning rate (0.75 / dim, at most 0.005)", "", OPTIMIZER,
                        above=0)
    min_lr: float = setting(None, "learning rate at the end (lr / 10)", "", OPTIMIZER, least=0)
    warmup: int = setting(None, "updates that raise it from 0 (a tenth of steps, at most 100)",
                          "", OPTIMIZER, least=0)
    schedule: str = setting("cosine", "its way down; wsd falls in the last fifth", "", OPTIMIZER,
                            choices=tuple(xtrain.SCHEDULES))
    weight_decay: float = setting(0.1, "of AdamW, on matrices only", "", OPTIMIZER, least=0)
    beta1: float = setting(0.9, "AdamW's mean of gradients", "", OPTIMIZER, least=0, below=1)
    beta2: float = setting(0.95, "AdamW's mean of their squares", "", OPTIMIZER, least=0, below=1)
    grad_clip: float = setting(1.0, "gradient norm above which all gradients shrink", "", OPTIMIZER,
                               above=0)

    # none of these changes what is computed, only how (bf16 apart)
    device: str = setting("auto", "where to compute", "", MACHINE, choices=("auto", "cpu", "cuda"))
    dtype: str = setting("auto", "what to compute in; auto is bf16 where that is faster", "",
                         MACHINE, choices=("auto", "f32", "bf16"))
    threads: int = setting(None, "CPU threads (physical cores); changes no result", "", MACHINE,
                           least=1, most=1024)
    flash: bool = setting(True, "attention in tiles; --no-flash: composed, the reference", "",
                          MACHINE)
    recompute: bool = setting(False, "less memory: run each block again going back", "", MACHINE)
    graph: bool = setting(True, "on a GPU, record a step once and replay it; --no-graph: launch "
                          "kernel by kernel", "", MACHINE)

    # evaluation, and runs that are no training but a check
    eval_every: int = setting(None, "evaluate on held-out text this often (a fifth of steps, at "
                              "most 250)", "updates", CHECKS, least=1)
    eval_tokens: int = setting(16384, "held-out tokens of an evaluation", "tokens", CHECKS, least=1)
    log_every: int = setting(10, "a line of metrics this often, and at the first", "updates",
                             CHECKS, least=1)
    patience: int = setting(None, "stop after so many evaluations without a new best", "", CHECKS,
                            least=1)
    overfit: bool = setting(False, "every update sees the first batch: the loss must go to 0", "",
                            CHECKS)
    bench: int = setting(None, "time so many steps on random tokens; the last line is JSON",
                         "steps", CHECKS, least=1)

    # where it goes, where it comes from
    out: str = setting(None, "run folder (runs/<preset>-<n>, or the one resumed)", "path", RUN)
    resume: str = setting(None, "a run (its newest checkpoint) or a checkpoint to go on from",
                          "path", RUN)
    save_every: int = setting(None, "checkpoint this often (as eval-every); also at the end, on "
                              "Ctrl-C, on SIGTERM and at a new best", "updates", RUN, least=1)
    keep: int = setting(3, "newest checkpoints that stay; the best one stays too", "", RUN, least=1)
    seed: int = setting(1337, "of weights, order of data, dropout and samples", "", RUN, least=0,
                        below=2**63)
    config: str = setting(None, "TOML file with any of these settings; flags win", "path", RUN)


# What a resumed run may not change, and what the next run does not take over from it.
ARCHITECTURE = ("dim", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab_size",
                "tie_embeddings", "qk_norm")
FIXED = ARCHITECTURE + ("preset", "tokenizer", "seed")
OWN = ("out", "resume", "config", "bench", "init_from", "max_minutes")


def read_settings(argv):
    """(Settings, {name: value} of those given, checkpoint to resume or None, its state or None).

    Weakest first: defaults, preset, settings stored with the checkpoint, --config, flags.
    """
    epilog = __doc__.split("How it reads")[0].split("\n", 2)[2]
    parser = xtrain.parser_of(Settings, "train.py", "Train a language model.", epilog)
    given = xtrain.parse(Settings, parser, argv)
    if "config" in given:
        path = given["config"]
        flags = xtrain.toml_flags(Settings, path)
        file = xtrain.parse(Settings, parser, flags, f"--config {path}: ")
        given = file | given
    source, state, stored = None, None, {}
    if "resume" in given:
        source = resume_point(given["resume"])
        state = xtrain.load_state(source)
        stored = stored_settings(state, source)
        refuse_changes(given, stored, source)
    for name in ("resume", "out", "init_from"):
        if "bench" in given and name in given:
            raise Refused(f"--bench and {xtrain.flag(name)}: a benchmark has no run; leave one out")
    if "init_from" in given and ("preset" in given or source):
        other = "--resume" if source else "--preset"
        raise Refused(f"--init-from and {other}: both say what the model is; leave one out")
    return Settings(**(stored | given)), given, source, state


def stored_settings(state, source):
    """The settings of a checkpoint's state; Refused if another program or version wrote it."""
    stored, known = state.get("settings"), {f.name for f in dataclasses.fields(Settings)}
    missing = [key for key in ("settings", "data", "versions", "step") if key not in state]
    unknown = sorted(set(stored or ()) - known)
    if missing or unknown:
        what = (f"has no {missing[0]!r}: train.py did not write it" if missing else
                f"has a setting {unknown[0]!r}: another version of xtrain wrote it")
        raise Refused(f"--resume {source}: its state.json {what}; --init-from starts a new run "
                      "from its weights")
    return stored


def resume_point(path):
    """The checkpoint folder that --resume means: of a run the newest that is whole."""
    if os.path.exists(os.path.join(path, "state.json")):
        return path
    steps = xtrain.checkpoints(path)
    if steps:
        newest = list(steps.values())[-1]
        for number, other in xtrain.checkpoints(path, whole=False).items():
            if number > max(steps):
                tell(f"{other} is not whole (no config.json or no weights): going on from {newest}")
        return newest
    what = "holds no checkpoint (step-00000001, ...)" if os.path.isdir(path) else "is no folder"
    if os.path.exists(os.path.join(path, "config.json")):
        what = "is a model without training state: --init-from starts a new run from its weights"
    raise Refused(f"--resume {path}: {what}")


def refuse_changes(given, stored, source):
    """Refused if a setting that belongs to the trained weights is given another value."""
    for name, value in given.items():
        if name in FIXED and value != stored.get(name):
            raise Refused(f"{xtrain.flag(name)} {value}: {source} has {stored.get(name)}, which a "
                          "resumed run cannot change; start a new run without --resume")


def model_config(s, vocab_size):
    """The xtrain.Config of settings: the preset's sizes, then the flags that were given."""
    sizes = dict(xtrain.PRESETS[s.preset])
    sizes |= {n: getattr(s, n) for n in ARCHITECTURE if getattr(s, n) is not None}
    sizes["max_seq"] = max(s.seq, sizes.get("max_seq", 0))
    sizes["vocab_size"] = vocab_size
    return xtrain.Config(**sizes, dropout=s.dropout, flash=s.flash, recompute=s.recompute)


# ---- 2. Corpora ----------------------------------------------------------------------------------
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
        if "metrics.jsonl" in names and "settings.json" in names:
            folders.clear()                         # a run of ours, no text
            continue
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


class Bar:
    """Progress over bytes: a bar on a terminal, elsewhere a line every ten seconds."""

    def __init__(self, what, total, on=True):
        self.what, self.total, self.done, self.last = what, total, 0, time.monotonic()
        self.on, self.bar = on, None
        if on and xtrain.terminal():
            self.bar = tqdm.tqdm(total=total, desc=what, unit="B", unit_scale=True, leave=False)

    def update(self, count):
        """So many bytes more are done."""
        self.done += count
        if self.bar is not None:
            self.bar.update(count)
        elif self.on and time.monotonic() - self.last > 10:
            self.last = time.monotonic()
            say(f"{self.what}: {self.done/1e6:.0f} of {self.total/1e6:.0f} MB")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.bar is not None:
            self.bar.close()


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
        """Progress over the bytes of all files."""
        return Bar(what, self.size, self.progress)

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


# ---- 3. Tokens -----------------------------------------------------------------------------------
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
    content = corpus.digest()
    # a stored Tokenizer is mostly the one that its kind gives on this corpus, cached with it
    given = None if isinstance(tokenizer, str) else tokenizer
    for asked in [tokenizer] if given is None else [given.kind, given.digest]:
        key = hashlib.sha256(f"{VERSION} {content} {asked}".encode()).hexdigest()
        folder = os.path.join(cache_root(), key[:32])
        if os.path.isdir(folder):
            try:
                found = open_tokens(folder)
                if given is None or found[0].digest == given.digest:
                    return found
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
        for name in os.listdir(root):           # of a process that was killed, a day ago or more
            path = os.path.join(root, name)
            if name.startswith(".unfinished-") and time.time() - os.path.getmtime(path) > 86400:
                shutil.rmtree(path, ignore_errors=True)
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
            xtrain.flush(os.path.join(work, name))
        try:
            os.rename(work, folder)
        except OSError:                 # there is one: a damaged one, or another process was faster
            try:
                return open_tokens(folder)
            except (Refused, OSError):
                shutil.rmtree(folder, ignore_errors=True)
                os.rename(work, folder)
        xtrain.flush(os.path.dirname(folder))
        return open_tokens(folder)
    finally:
        if not temporary:
            shutil.rmtree(work, ignore_errors=True)


def held_out(text):
    """Is the document that begins with this piece held out?  One in 20, by its content alone."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little") % HELD_OUT == 0


def write_tokens(folder, tokenizer, texts):
    """Encode texts (what `pieces` yields) into folder/tokens.bin.

    Held-out documents come after the others.  Where the hash held out less than 1 % or more
    than 25 % (few documents), the last 5 % of the tokens are held out instead, at least 3.
    """
    kind = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    path, counts, documents, first = os.path.join(folder, "tokens.bin"), [0, 0], 0, True
    with open(path, "w+b") as f, tempfile.TemporaryFile(dir=folder) as held:
        f.write(bytes(HEADER.size))
        for ids, text, ends in tokenizer.stream(texts):
            if first:
                side = held_out(text)
            (f, held)[side].write(ids.astype(kind).data)
            counts[side] += len(ids)
            documents, first = documents + ends, ends
        held.seek(0)
        shutil.copyfileobj(held, f)
        total = sum(counts)
        if total < 5:
            raise Refused(f"--data: {total} tokens with end of text are too few, at least 5 are "
                          "needed to train on some and hold some out: give more text")
        if not max(3, total/100) <= counts[1] <= total/4:
            counts[1] = max(3, total//HELD_OUT)     # to read, to predict, end of text
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


# ---- 4. Loader -----------------------------------------------------------------------------------
# Nothing here remembers anything: which text a sequence is follows from its number, so a resumed
# run needs no state of the loader, and ranks need not talk to each other to share an epoch.

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
        """Update n, from 1, of a run whose batch never changed -> ([Micro], counted); see `at`."""
        micros, counted = self.at((n - 1)*self.sequences)
        return list(micros), counted

    def at(self, first):
        """The update whose global batch begins with sequence number `first` of the run.

        -> (iterator over this rank's Micros, counted targets of the whole global batch)
        """
        first += self.rank*self.accum*self.batch
        # one by one, so that memory does not grow with --accum-steps; all of their targets count
        numbers = range(first, first + self.accum*self.batch, self.batch)
        return map(self.micro, numbers), self.sequences*self.seq

    def micro(self, number):
        """The Micro whose first row is sequence `number`."""
        rows = np.stack([self.window(number + i) for i in range(self.batch)])
        tokens, targets = rows[:, :-1].copy(), rows[:, 1:].copy()
        return Micro(tokens, targets, np.argsort(tokens, axis=None, kind="stable"), number)


# ---- 5. Run --------------------------------------------------------------------------------------
# A Run is all that training is about and nothing of how it is shown.  Its whole state is weights,
# moments and a few counters: those are in a checkpoint, everything else follows from the settings.
# The second half of the section finds the folder that it writes to and keeps others out of it.

class Run:
    """A training run: settings s, model, optimizer, data, folder, and how far it has come.

    step counts updates, sequences those trained on (their number is all that the order of the data
    and the dropout masks depend on); best is {"step", "val_loss"} or None.
    """

    def __init__(self, s, given, source=None, state=None):
        self.s, self.source, self.state = s, source, state or {}
        self.machine = xtrain.machine(s.device, s.dtype, s.threads)
        start = source or s.init_from and xtrain.find_model(s.init_from)
        # cheap refusals first: reading a large corpus takes minutes
        if not start:
            model_config(s, s.vocab_size or 1 << 16)
        tokenizer = stored_tokenizer(start, given) if start else None
        self.tokenizer, self.tokens = prepare(s.data, tokenizer or s.tokenizer, s.encoding,
                                              s.errors)
        s.tokenizer = self.tokenizer.kind
        if self.state and self.state["data"] != self.tokens.digest:
            raise Refused(f"--data: {source} was trained on other text (digest "
                          f"{self.state['data'][:12]}, now {self.tokens.digest[:12]}), which a "
                          "resumed run cannot change")
        self.loader = Loader(self.tokens.train, s.seq, s.batch, s.accum_steps, s.seed)
        self.model = self.make_model(start, given)
        self.optimizer = make_optimizer(self.model, s)
        self.trainer = xtrain.Step(self.model, self.optimizer, graph=s.graph)
        self.step, self.sequences = self.state.get("step", 0), self.state.get("sequences", 0)
        self.best = self.state.get("best")
        self.bad_evaluations = self.state.get("bad_evaluations", 0)
        if s.patience and self.bad_evaluations >= s.patience:
            self.bad_evaluations = 0        # it stopped there, and is to go on
        if source:
            xtrain.load_optimizer(self.optimizer, source, self.step)
        self.complete_settings()

    def make_model(self, start, given):
        """The Decoder: new, or from the folder `start`, whose sizes then are the settings'."""
        s, machine = self.s, self.machine
        if not start:
            config = model_config(s, vocab_size(s.vocab_size, self.tokenizer))
            model = xtrain.Decoder(config, machine.device, machine.dtype, s.seed)
        else:
            model = xtrain.load_pretrained(start, machine.device, machine.dtype)
            c = model.config
            for name in ARCHITECTURE:
                if given.get(name, getattr(c, name)) != getattr(c, name):
                    raise Refused(f"{xtrain.flag(name)} {given[name]}: {start} has "
                                  f"{getattr(c, name)}")
            if c.vocab_size < self.tokenizer.vocab_size:
                raise Refused(f"--tokenizer {self.tokenizer.kind}: has {self.tokenizer.vocab_size} "
                              f"ids, {start} only {c.vocab_size}; leave it out")
            c.max_seq = max(c.max_seq, s.seq)
            c.dropout, c.flash, c.recompute = s.dropout, s.flash, s.recompute
            model.seed = s.seed
        for name in ARCHITECTURE:
            setattr(s, name, getattr(model.config, name))
        return model.train()

    def complete_settings(self):
        """Fill in what follows from other settings; it is stored as not given, to follow again."""
        s = self.s
        self.stored = {k: v for k, v in dataclasses.asdict(s).items() if k not in OWN}
        self.stored["data"] = s.data and os.path.abspath(s.data)
        self.stored["dtype"] = self.machine.dtype       # "auto" might decide otherwise next time
        s.lr = min(0.75/s.dim, 5e-3) if s.lr is None else s.lr
        s.min_lr = s.lr/10 if s.min_lr is None else s.min_lr
        s.warmup = min(100, s.steps//10) if s.warmup is None else s.warmup
        s.eval_every = min(250, max(1, s.steps//5)) if s.eval_every is None else s.eval_every
        s.save_every = s.eval_every if s.save_every is None else s.save_every

    @property
    def tokens_per_step(self):
        return self.s.batch*self.s.seq*self.s.accum_steps

    def lr(self, step):
        """The learning rate of update `step`."""
        s = self.s
        return xtrain.SCHEDULES[s.schedule](step, s.steps, s.lr, s.min_lr, s.warmup)

    def advance(self, interrupted, look=True):
        """One update -> (loss, gradient norm, lr); None if interrupted() before it was done.

        An update that was begun and not done leaves weights and moments as they were.  look=False:
        () instead, and nobody waits for a GPU; what went wrong there shows at the next look.
        """
        first = 0 if self.s.overfit else self.sequences
        micros, counted = self.loader.at(first)
        for micro in micros:
            if interrupted():
                self.trainer.forget()
                return None
            self.trainer.micro(micro.tokens, micro.targets, micro.order, micro.first_sequence,
                               counted)
        lr = self.lr(self.step + 1)
        seen = self.trainer.update(lr, wait=look)
        if look and not (math.isfinite(seen[0]) and math.isfinite(seen[1])):
            raise NonFinite(self.step + 1, f"loss {seen[0]}, gradient norm {seen[1]}")
        self.step += 1
        self.sequences += self.s.batch*self.s.accum_steps
        return (*seen, lr) if look else ()

    def evaluate(self):
        """(loss, bits per byte) of held-out text; keeps account of the best."""
        loss, bpb = xtrain.evaluate(self.model, self.tokens.held_out, self.tokenizer.lengths,
                                    self.s.seq, self.s.batch, self.s.eval_tokens)
        if not math.isfinite(loss):
            raise NonFinite(self.step, f"held-out loss {loss}")
        if self.best is None or loss < self.best["val_loss"]:
            self.best, self.bad_evaluations = {"step": self.step, "val_loss": loss}, 0
        else:
            self.bad_evaluations += 1
        return loss, bpb

    def is_best(self):
        """Was the evaluation of this very step the best so far?"""
        return self.best is not None and self.best["step"] == self.step

    def save(self, folder):
        """Write the checkpoint of this step, then delete what need not be kept; returns its path.
        """
        if self.optimizer.nonfinite:        # in a step that nobody looked at
            raise NonFinite(self.step, "a gradient norm was not finite")
        state = {"step": self.step, "sequences": self.sequences, "best": self.best,
                 "bad_evaluations": self.bad_evaluations, "data": self.tokens.digest,
                 "versions": versions(self.machine), "settings": self.stored}
        path = xtrain.save_checkpoint(folder, self.model, self.optimizer, self.tokenizer, state)
        best = self.best["step"] if self.best else None
        if best is not None:
            xtrain.publish(os.path.join(folder, "best.json"),
                           lambda p: xtrain.write_json(p, self.best))
        xtrain.prune(folder, self.s.keep, best)
        return path


def make_optimizer(model, s):
    """The optimizer of settings; --lr is for schedules to vary."""
    return xtrain.AdamW(model, s.lr or 3e-4, (s.beta1, s.beta2), weight_decay=s.weight_decay,
                        grad_clip=s.grad_clip)


class NonFinite(Exception):
    """A loss or gradient norm is infinite or NaN; such an update leaves weights and moments alone.
    """

    def __init__(self, step, what):
        super().__init__(f"step {step}: {what}: the weights have run away; try a lower --lr, a "
                         "longer --warmup or a smaller --grad-clip")


def stored_tokenizer(folder, given):
    """The tokenizer that lies with a model, unless --tokenizer asks for another; else None."""
    if "tokenizer" in given or not os.path.exists(os.path.join(folder, "tokenizer.json")):
        return None
    return xtrain.Tokenizer.load(folder)


def vocab_size(asked, tokenizer):
    """The model's vocabulary: the tokenizer's count, or more if asked for (the rest is padding)."""
    if asked is not None and asked < tokenizer.vocab_size:
        raise Refused(f"--vocab-size {asked}: {tokenizer.kind} has {tokenizer.vocab_size} ids, "
                      "end of text included; give at least that, or leave it out")
    return asked or tokenizer.vocab_size


def versions(machine):
    """What "the same bits" depends on."""
    return {"xtrain": xtrain.__version__, "python": platform.python_version(),
            "numpy": np.__version__, "core": machine.core, "dtype": machine.dtype}


def run_folder(s, source):
    """(path, made just now?): --out, the resumed run's, or the next free runs/<preset>-<n>."""
    resumed = os.path.normpath(os.path.join(source or "", ".."))
    if source and s.out is None and os.path.exists(os.path.join(resumed, "metrics.jsonl")):
        return resumed, False
    if s.out:
        made = not os.path.isdir(s.out)
        os.makedirs(s.out, exist_ok=True)
        return s.out, made
    for n in itertools.count(1):
        try:
            os.makedirs(os.path.join("runs", f"{s.preset}-{n}"))    # fails if another was faster
            return os.path.join("runs", f"{s.preset}-{n}"), True
        except FileExistsError:
            pass


def lock_folder(s, source):
    """(run folder, made just now?, handle that keeps other processes out until it is closed)."""
    try:
        folder, made = run_folder(s, source)
        with tempfile.TemporaryFile(dir=folder):
            pass                                    # so it can be written
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)        # ends with the process, however
        return folder, made, lock
    except BlockingIOError:
        raise Refused(f"--out {folder}: another process is training there; wait for it, or choose "
                      "another folder") from None
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise Refused(f"--out {s.out or 'runs'}: {e.strerror}; choose another folder") from None


@contextlib.contextmanager
def claimed_folder(s, source):
    """The run folder, for this process alone; removed again if nothing came of it.

    Refused if it holds another run, is in use, is a file or cannot be written.
    """
    folder, made, lock = lock_folder(s, source)
    try:
        check_free(folder, source)
        yield folder
    finally:
        os.close(lock)
        if made and not os.listdir(folder):
            os.rmdir(folder)


def check_free(folder, source):
    """Refused if the folder holds a run that is not the one to resume, or files that no run wrote.

    A run that was killed before its first checkpoint holds nothing, and may be begun again.
    """
    if source and os.path.samefile(folder, os.path.join(source, "..")):
        return
    if xtrain.checkpoints(folder):
        raise Refused(f"--out {folder}: holds a run already; go on with it by --resume {folder}, "
                      "or choose another folder")
    found = [name for name in ("settings.json", "metrics.jsonl", "best.json", "loss.png")
             if os.path.lexists(os.path.join(folder, name))]
    try:
        with open(os.path.join(folder, "settings.json"), encoding="utf-8") as f:
            ours = "accum_steps" in json.load(f)
    except (OSError, ValueError, TypeError):
        ours = False
    if found and not ours:
        raise Refused(f"--out {folder}: has a {found[0]} that no run wrote, which a run would "
                      "overwrite; choose another folder")


# ---- 6. Logs -------------------------------------------------------------------------------------
# People read stdout (plain lines) or a bar on stderr; programs read metrics.jsonl.  Numbers for
# people are rounded and come with their formula in the banner, those for programs are neither.

def banner(run, folder):
    """Everything that the numbers of a run depend on, and the formulas they are made by."""
    s, c, tokens = run.s, run.model.config, run.tokens
    flops = c.flops_per_token(s.seq)
    kind = " (tied)" if c.tie_embeddings else ""
    source = s.data or "Python's standard library"
    return f"""\
xtrain {xtrain.__version__} on {run.machine.name}, {run.machine.dtype}, \
peak {run.machine.peak/1e9:.0f} GFLOP/s ({run.machine.how}, just measured)
model   {s.init_from or s.preset}: dim {c.dim}, {c.layers} layers, {c.heads} heads \
({c.kv_heads} kv) of {c.head_dim}, ffn {c.ffn}, vocabulary {c.vocab_size:,}{kind}
        {run.model.total_params:,} parameters, {run.model.core_params:,} without embedding and head
data    {source}: {tokens.documents:,} documents, {len(tokens.train):,} tokens ({s.tokenizer}), \
{len(tokens.held_out):,} held out
step    {run.tokens_per_step:,} tokens = {s.batch} sequences x {s.seq} tokens x {s.accum_steps} \
micro-steps; {s.steps:,} steps = {s.steps*run.tokens_per_step/len(tokens.train):.2f} epochs
        lr {s.lr:.2g} after {s.warmup} steps of warm-up, then {s.schedule} to {s.min_lr:.2g}
speed   {flops/1e6:.1f} MFLOP a token = 6 x weights of products + 6 x layers x heads x head_dim \
x seq;
        % of peak = tokens/s x that / peak; evaluation, saving and sampling are not in tokens/s
loss    nats a token; bits a byte = loss x tokens / (ln 2 x bytes), comparable between tokenizers
run     {folder}{f", resumed at step {run.step}" if run.source else ""}"""


def tell(text):
    """Print something for people.  That nobody reads it any more (| head) must not end a run."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class Progress:
    """A progress bar on a terminal, plain lines elsewhere; lines for people go to stdout."""

    def __init__(self, run):
        self.run, self.bar, self.shown = run, None, run.step
        if xtrain.terminal():
            form = "{n_fmt}/{total_fmt} {bar} {postfix} [{elapsed}<{remaining}]"
            self.bar = tqdm.tqdm(total=run.s.steps, initial=run.step, dynamic_ncols=True,
                                 bar_format=form)

    def say(self, text):
        """A line (or several) for people."""
        if self.bar is None:
            tell(text)
        else:
            with self.bar.external_write_mode():
                tell(text)

    @property
    def drawn(self):
        """Does the bar want figures now?  A GPU is not made to wait for more than ten a second."""
        return self.bar is not None and time.time() - self.bar.last_print_t > 0.1

    def update(self, loss, norm, lr, tok_s):
        """Move the bar on to the run's step."""
        if self.bar is not None:
            self.bar.set_postfix_str(self.figures(loss, norm, lr, tok_s), refresh=False)
            self.bar.update(self.run.step - self.shown)
            self.shown = self.run.step

    def line(self, loss, norm, lr, tok_s, left):
        """The same in a plain line, where there is no bar.  left: seconds to the end."""
        if self.bar is None:
            s, step = self.run.s, self.run.step
            self.say(f"step {step:{len(str(s.steps))}}/{s.steps}  "
                     f"{self.figures(loss, norm, lr, tok_s)}  {duration(left)} left")

    def figures(self, loss, norm, lr, tok_s):
        """Loss, gradient norm, learning rate, speed, share of the machine's peak."""
        peak = tok_s*self.run.model.config.flops_per_token(self.run.s.seq)/self.run.machine.peak
        return (f"loss {loss:.4f}  norm {norm:.2f}  lr {lr:.1e}  {tok_s:,.0f} tok/s  "
                f"{100*peak:.0f} % of peak")

    def close(self):
        """Leave the bar as it stands."""
        if self.bar is not None:
            self.bar.close()


def duration(seconds):
    """1:05 or 2:03:04."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Metrics:
    """metrics.jsonl: one object a line; a resumed run cuts it back to the step it goes on from."""

    def __init__(self, folder, run):
        self.folder, self.path = folder, os.path.join(folder, "metrics.jsonl")
        older = self.path
        if run.source and not os.path.exists(older):        # resumed into another folder
            older = os.path.join(os.path.dirname(os.path.abspath(run.source)), "metrics.jsonl")
        kept = [row for row in read_metrics(older) if row["step"] <= run.step]
        text = "".join(json.dumps(row) + "\n" for row in kept)
        xtrain.publish(self.path, lambda temporary: write_text(temporary, text))
        self.file = open(self.path, "a", encoding="utf-8")

    def write(self, **row):
        """Append a line; a reader sees it at once."""
        try:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
        except OSError as e:
            e.filename = self.path          # for whoever tells the user that the disk is full
            raise

    def picture(self):
        """Draw loss.png if matplotlib is there."""
        if importlib.util.find_spec("matplotlib") is None:
            return
        xtrain.publish(os.path.join(self.folder, "loss.png"),
                       lambda temporary: draw(read_metrics(self.path), temporary))

    def close(self):
        self.file.close()


def write_text(path, text):
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)


def read_metrics(path):
    """The rows of a metrics.jsonl, [] without one.  What is no row (a kill can cut the last one
    short) is left out."""
    rows = []
    if os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as f:
            for line in f:
                try:
                    row = json.loads(line)
                    if isinstance(row["step"], int):
                        rows.append(row)
                except (ValueError, TypeError, KeyError):
                    pass
    return rows


def draw(rows, path):
    """Training and validation loss over the steps, as a PNG."""
    from matplotlib.figure import Figure        # half a second, and only pictures need it
    figure = Figure((8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    for key, style in (("loss", "-"), ("val_loss", "o-")):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points), style, label={"loss": "training", "val_loss": "held out"}[key])
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=120)


# ---- 7. Loop -------------------------------------------------------------------------------------
# A signal only sets a flag.  The loop looks at it between micro-steps and after each update, saves
# what the last whole update left, and ends; so there is no moment at which state is half-written.

SAMPLE_TOKENS, LAST_SAMPLE_TOKENS = 40, 120         # at an evaluation, at the end


class Signals:
    """While open, SIGINT and SIGTERM ask the loop to stop; a second one ends the process at once.

    `caught` is the number of the signal, or None.
    """

    def __enter__(self):
        self.caught, self.before = None, {}
        for number in (signal.SIGINT, signal.SIGTERM):
            self.before[number] = signal.signal(number, self.catch)
        return self

    def catch(self, number, frame):
        self.caught = number
        for each, handler in self.before.items():
            signal.signal(each, handler)
        try:            # not print: it may have been interrupted itself, or have lost its reader
            os.write(2, f"\n{signal.Signals(number).name}: saving, then stopping\n".encode())
        except OSError:
            pass

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)


class Clock:
    """Seconds and tokens of training alone, since the start and since the last line."""

    def __init__(self):
        self.seconds = self.tokens = self.line_seconds = self.line_tokens = 0

    def add(self, seconds, tokens):
        self.seconds += seconds
        self.tokens += tokens
        self.line_seconds += seconds
        self.line_tokens += tokens

    def speed(self, restart=False):
        """Tokens a second since the last restart."""
        speed = self.line_tokens/max(self.line_seconds, 1e-9)
        if restart:
            self.line_seconds = self.line_tokens = 0
        return speed


def due(step, every, steps):
    """Is something that happens every so many steps, and at the end, due after this one?"""
    return step % every == 0 or step == steps


def train(run, folder):
    """Train to the end, or to a signal, the time or patience; returns the exit code."""
    s, metrics, progress, clock = run.s, Metrics(folder, run), Progress(run), Clock()
    deadline = time.monotonic() + 60*(s.max_minutes or math.inf)
    # the step of the newest checkpoint, and why training ends early
    saved = run.step if run.step in xtrain.checkpoints(folder) else None
    why = None
    try:
        with Signals() as signals:
            # in this order, so that a checkpoint holds everything that its step led to: a run that
            # goes on from it begins with the next update
            while run.step < s.steps and not why:
                if update(run, metrics, progress, clock, lambda: signals.caught):
                    if due(run.step, s.eval_every, s.steps):
                        evaluate(run, metrics, progress)
                why = reason_to_stop(run, signals, deadline)
                best_now = run.is_best() and saved != run.step
                if saved != run.step and run.step and (why or best_now or
                                                       due(run.step, s.save_every, s.steps)):
                    run.save(folder)
                    saved = run.step
        progress.close()
        finish(run, folder, clock, why, signals.caught)
        return 128 + signals.caught if signals.caught else 0
    except (MemoryError, RuntimeError) as e:
        progress.close()
        if xtrain.T.out_of_memory(e) and saved != run.step and run.step:
            rescue(run, folder, e)
        raise
    finally:
        progress.close()
        metrics.close()


def rescue(run, folder, error):
    """After an error that says memory ran out, save what the last whole update left, if it can be.
    """
    traceback.clear_frames(error.__traceback__)     # they hold what the failed step had computed
    with contextlib.suppress(MemoryError):
        tell(f"memory ran out after step {run.step}: saved {run.save(folder)}, from which --resume "
             "goes on")


def reason_to_stop(run, signals, deadline):
    """Why training ends before its last step, in words, or None."""
    if signals.caught:
        return f"stopped by {signal.Signals(signals.caught).name}"
    if time.monotonic() > deadline:
        return f"stopped after --max-minutes {run.s.max_minutes:g}"
    if run.s.patience and run.bad_evaluations >= run.s.patience:
        return f"stopped: {run.bad_evaluations} evaluations without a new best (--patience)"
    return None


def update(run, metrics, progress, clock, interrupted):
    """One update with its logs; False if it was interrupted before it was done."""
    start, s, step = time.perf_counter(), run.s, run.step + 1
    log = step == 1 or due(step, s.log_every, s.steps)
    done = run.advance(interrupted, log or progress.drawn or run.machine.device == "cpu")
    if done is None:
        return False
    clock.add(time.perf_counter() - start, run.tokens_per_step)
    if done:
        progress.update(*done, clock.speed())
    if log:
        loss, norm, lr = done
        speed = clock.speed(restart=True)
        metrics.write(step=run.step, loss=loss, grad_norm=norm, lr=lr, tok_s=speed)
        left = (run.s.steps - run.step)*run.tokens_per_step/speed
        progress.line(loss, norm, lr, speed, left)
    return True


def evaluate(run, metrics, progress):
    """Held-out loss, its line, the picture and a sample."""
    loss, bpb = run.evaluate()
    # held-out text of end-of-text ids alone has no bytes; JSON has no NaN
    metrics.write(step=run.step, val_loss=loss, val_bpb=bpb if math.isfinite(bpb) else None)
    mark = "  (best so far)" if run.is_best() else ""
    progress.say(f"step {run.step}: held-out loss {loss:.4f}, {bpb:.4f} bits a byte{mark}")
    metrics.picture()
    if run.step < run.s.steps:
        progress.say(indented(sample(run, SAMPLE_TOKENS)))


def sample(run, count):
    """A text of so many tokens from the model as it is; where one ends, the next one begins."""
    model, s = run.model, run.s
    ids = xtrain.generate(model.eval(), [run.tokenizer.eot], count, temperature=0.8, top_k=50,
                          seed=s.seed)
    text = run.tokenizer.decode(list(ids))
    model.train()
    return text


def indented(text):
    """A text as a quotation; control characters would play tricks on the terminal."""
    lines = text.expandtabs(4).split("\n")
    return "\n".join("    | " + "".join(c if c.isprintable() else "\ufffd" for c in line)
                     for line in lines)


def finish(run, folder, clock, why, caught):
    """Say how it ended, show what the model writes, and name the next commands."""
    if why:
        tell(f"{why} at step {run.step} of {run.s.steps}")
    if clock.tokens:
        tell(f"trained on {clock.tokens:,} tokens in {clock.seconds:.1f} s: "
              f"{clock.tokens/clock.seconds:,.0f} tok/s = tokens / seconds, evaluation, saving and "
              "sampling excluded")
    if not run.step:
        tell("nothing was trained, so nothing was saved")
        return
    if not caught:
        tell("the model writes (temperature 0.8, top-k 50):\n"
              + indented(sample(run, LAST_SAMPLE_TOKENS)))
    done = run.step >= run.s.steps              # perhaps stopped at the last step
    prompt = " --prompt 'def '" if run.s.data is None else ""       # Python's own library
    folder = shlex.quote(folder)
    tell(f"sample:  python sample.py --model {folder}{prompt}\n"
          f"go on:   python train.py --resume {folder}"
          + (f" --steps {2*run.s.steps}" if done else ""))


# ---- 8. Bench ------------------------------------------------------------------------------------
# The race against other frameworks: no text, no evaluation, no files.  Making the random tokens is
# not timed; sorting them is (a loader does it, for the embedding's gradient): no peer needs to.

BURN_IN = 3         # steps: the buffer pool is full after the second


def bench(s):
    """Time s.bench steps on random tokens; the last line is JSON.  Returns the exit code.

    tok_s and GFLOP_s are of the median step.
    """
    machine = xtrain.machine(s.device, s.dtype, s.threads)
    preset = xtrain.PRESETS[s.preset].get("vocab_size", xtrain.Config.vocab_size)
    config = model_config(s, s.vocab_size or preset)
    model = xtrain.Decoder(config, machine.device, machine.dtype, s.seed)
    step = xtrain.Step(model, make_optimizer(model, s), graph=s.graph)
    rng, seconds, count = np.random.default_rng(s.seed), [], s.batch*s.seq*s.accum_steps
    for i in tqdm.trange(BURN_IN + s.bench, desc="bench", leave=False,
                         disable=not xtrain.terminal()):
        micros = random_micros(rng, config.vocab_size, s)
        start = time.perf_counter()
        for tokens, targets in micros:
            step.micro(tokens, targets, np.argsort(tokens, axis=None, kind="stable"), counted=count)
        loss, _ = step.update()
        seconds.append(time.perf_counter() - start)
    if not math.isfinite(loss):
        return xtrain.complain(f"--bench: the loss is {loss}; try a lower --lr", 3)
    timed = sorted(seconds[BURN_IN:])
    middle = timed[len(timed)//2]
    speed = count/middle
    flops = speed*config.flops_per_token(s.seq)
    print(f"{speed:,.0f} tok/s = {count:,} tokens / {middle:.4f} s (median of {len(timed)} steps); "
          f"{flops/1e9:.1f} GFLOP/s = {100*flops/machine.peak:.1f} % of {machine.peak/1e9:.0f} "
          f"({machine.how})")
    print(json.dumps({
        "tok_s": round(speed, 1), "ms": round(middle*1e3, 3), "best_ms": round(timed[0]*1e3, 3),
        "GFLOP_s": round(flops/1e9, 2), "mfu": round(flops/machine.peak, 6),
        "peak_GB": round(xtrain.peak_memory(machine.device)/2**30, 3),
        "params_M": round(model.total_params/1e6, 3), "loss": loss, "device": machine.device,
        "dtype": machine.dtype, "machine": machine.name, "peak_GFLOP_s": round(machine.peak/1e9, 1),
        "batch": s.batch, "seq": s.seq, "accum_steps": s.accum_steps, "steps": s.bench}))
    return 0


def random_micros(rng, vocab, s):
    """The micro-steps of an update on random tokens: [(tokens, targets)], int64 [batch, seq]."""
    windows = rng.integers(0, vocab, (s.accum_steps, s.batch, s.seq + 1))
    return [(window[:, :-1].copy(), window[:, 1:].copy()) for window in windows]


# ---- 9. Start ------------------------------------------------------------------------------------
# Order matters: what is cheap to refuse is refused before the folder is made and the corpus read,
# and a folder in which nothing was trained is taken away again.

def main(argv):
    """Run one command line; returns its exit code."""
    s, given, source, state = read_settings(argv)
    # A graph has no cycles (autograd.record), so Python has little to collect: looking for it after
    # every 700 new objects, its default, takes 0.12 ms of a small model's step of 27
    gc.set_threshold(100_000)
    try:
        return bench(s) if s.bench else start(s, given, source, state)
    except (MemoryError, RuntimeError) as e:
        e.less = less_memory(s)
        raise


def less_memory(s):
    """What needs less memory than these settings, for the line that says it ran out."""
    knobs = {"a smaller --batch with more --accum-steps": s.batch > 1,
             "--recompute": not s.recompute, "--flash": not s.flash}
    left = "".join(f"{text}, " for text, free in knobs.items() if free)
    return f"{left}{'or ' if left else ''}a smaller --seq or model"


def start(s, given, source, state):
    """Train, from the start or from a checkpoint; returns the exit code."""
    if source and state["step"] >= s.steps:
        print(f"{source} is at step {state['step']} already, --steps is {s.steps}: raise it to go "
              "on")
        return 0
    with claimed_folder(s, source) as folder:
        run = Run(s, given, source, state)
        prepare_folder(folder, run)
        tell(banner(run, folder))
        try:
            return train(run, folder)
        except NonFinite as e:
            kept = list(xtrain.checkpoints(folder).values())
            newest = f"; the newest good checkpoint is {kept[-1]}" if kept else ""
            return xtrain.complain(f"{e}{newest}", 3)


# What xtrain.publish and discard leave when they are killed; nobody else's files.
LEFT_BEHIND = re.compile(r"\.(step-\d{8,}|settings\.json|best\.json|metrics\.jsonl|loss\.png)"
                         r"\.(\d+|dying)")


def prepare_folder(folder, run):
    """Write settings.json; put what a kill left, and what comes after the resumed step, away."""
    for name in filter(LEFT_BEHIND.fullmatch, os.listdir(folder)):
        xtrain.remove(os.path.join(folder, name))
    if run.source:
        now = versions(run.machine)
        changed = [f"{k} {v} -> {now[k]}" for k, v in run.state["versions"].items()
                   if now.get(k) != v]
        if changed:
            tell(f"resumed under other versions, the bits may differ: {', '.join(changed)}")
        set_later_aside(folder, run.step)
        bring_best(folder, run)
    xtrain.publish(os.path.join(folder, "settings.json"),
                   lambda p: xtrain.write_json(p, dataclasses.asdict(run.s)))


def set_later_aside(folder, step):
    """Rename the checkpoints that are later than the step resumed from; keep a copy of the metrics.
    """
    every = xtrain.checkpoints(folder, whole=False)
    later = [path for number, path in every.items() if number > step]
    for path in later + [os.path.join(folder, "metrics.jsonl")]*bool(later):
        aside = os.path.join(folder, f".later-{os.path.basename(path)}")
        xtrain.remove(aside)
        shutil.copy(path, aside) if path.endswith(".jsonl") else os.rename(path, aside)
        tell(f"{path} is later than the step resumed from: kept as {aside}")


def bring_best(folder, run):
    """The best checkpoint so far goes along into another folder; if it is gone it is forgotten."""
    if run.best is None or run.best["step"] in xtrain.checkpoints(folder):
        return
    old = xtrain.checkpoints(os.path.join(run.source, "..")).get(run.best["step"])
    if old is None:
        run.best = None
    else:
        xtrain.publish(os.path.join(folder, os.path.basename(old)),
                       lambda path: shutil.copytree(old, path))


if __name__ == "__main__":
    sys.exit(xtrain.exit_code(main, sys.argv[1:]))
