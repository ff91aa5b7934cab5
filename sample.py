"""sample: the command line that generates text, measures a text's loss, and exports a model.

    python sample.py --prompt "def "                      the newest run under runs/
    python sample.py --model runs/laptop-1 --num 3 --temperature 0.7 --top-p 0.9
    python sample.py --model my-model --prompt "Once" --temperature 0     greedy: the same each time
    python sample.py --model runs/laptop-1 --eval notes.txt               loss and bits per byte
    python sample.py --model runs/laptop-1 --export out --dtype bf16      for transformers

--model is a run's folder (its last checkpoint is taken), a checkpoint, or a Hugging Face folder of
a Qwen3 or Llama with its tokenizer.json.

stdout gets the prompt, the text, and nothing else, as UTF-8 whatever the locale; on a terminal a
line end follows.  Several samples have a line `---` between them.  With --json a line is one
object: "ids", prompt and continuation (an empty prompt is the id of end of text), and "text".
Sample i depends on --seed and i alone: --num 5 begins with what --num 2 gives.  Exit codes: 0;
2 for bad input; 4 out of memory or disk; 130 after Ctrl-C.

How it reads, top to bottom:

1. Settings     the flags
2. Model        the folder that --model means, its weights and tokenizer
3. Text         streaming without broken characters, JSON
4. Other uses   --eval, --export
5. Main
"""
import codecs
import dataclasses
import errno
import json
import os
import sys
import time

try:
    import xtrain
except ImportError as e:        # the core is not built, or XTRAIN_ISA names one that cannot run
    if __name__ != "__main__":
        raise
    print(f"xtrain: error: {e}", file=sys.stderr)
    sys.exit(2)
from xtrain import Refused, say, setting

# ---- 1. Settings ---------------------------------------------------------------------------------

@dataclasses.dataclass
class Settings:
    """The flags of sample.py: a field is a flag."""
    model: str = setting(None, "run, checkpoint or Hugging Face folder (default the newest "
                               "checkpoint under runs/)", "path", "Model")
    device: str = setting("auto", "where to compute", group="Model",
                          choices=("auto", "cpu", "cuda"))
    dtype: str = setting("auto", "what to compute in (auto: as the run did); with --export, of the "
                                 "file (auto: f32)", group="Model", choices=("auto", "f32", "bf16"))
    prompt: str = setting("", "text to continue; empty starts from end of text", group="Text")
    max_new: int = setting(100, "at most so many new ones", "tokens", group="Text", least=1,
                          most=10**9)
    num: int = setting(1, "how many texts", group="Text", least=1, most=1000)
    seed: int = setting(1337, "of the random numbers", group="Text", least=0, below=2**64)
    temperature: float = setting(0.8, "logits are divided by it; 0 takes the likeliest token",
                                 group="Text", least=0)
    top_k: int = setting(None, "only among the k likeliest; leave it out for no limit",
                         "tokens", group="Text", least=1)
    top_p: float = setting(1.0, "only among the likeliest that together reach it; 1 is no limit",
                           "probability", group="Text", above=0, most=1)
    json: bool = setting(False, "one JSON object a line", group="Output")
    eval: str = setting(None, "print the loss of this UTF-8 text file instead", "path",
                        group="Output")
    export: str = setting(None, "write a Hugging Face folder there instead", "path",
                          group="Output")


def read_settings(argv):
    """Settings from the command line; Refused names what is wrong."""
    parser = xtrain.parser_of(Settings, "sample.py", __doc__.split("\n\n")[0],
                              "Examples and formats: the head of sample.py.")
    s = Settings(**xtrain.parse(Settings, parser, argv))
    # refuses one that is not there; a file's dtype asks nothing of it
    s.device = xtrain.find_device(s.device, s.dtype if s.export is None else "f32")
    return s


# ---- 2. Model ------------------------------------------------------------------------------------

def load(path, dtype, device):
    """(model, tokenizer) of what --model names; Refused if a part is missing or they do not fit."""
    folder = xtrain.find_model(path)
    if path is None and sys.stderr.isatty():
        say(f"model {folder}")
    tokenizer = xtrain.Tokenizer.load(folder)
    dtype = xtrain.run_dtype(folder, device) if dtype == "auto" else dtype
    model = xtrain.load_pretrained(folder, device, dtype)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise Refused(f"{folder}: tokenizer.json has {tokenizer.vocab_size} ids, config.json only "
                      f"{model.config.vocab_size}: they are not of one model; copy the right one")
    return model, tokenizer


def prompt_of(text, tokenizer):
    """(text, its ids); an empty prompt is end of text."""
    try:
        # the bytes that the shell gave, whatever locale Python read them in
        text = os.fsencode(text).decode("utf-8")
    except UnicodeError:
        raise Refused("--prompt is not UTF-8: convert it, for example with iconv") from None
    ids = tokenizer.encode(text)
    if not ids and tokenizer.eot is None:
        raise Refused("--prompt is empty, and this tokenizer has no end of text to start from: "
                      "give a --prompt")
    return text, list(ids) or [tokenizer.eot]


# ---- 3. Text -------------------------------------------------------------------------------------

AT_ONCE = 8                         # samples computed together: they share each read of the weights


def write(data):
    """Put text (str, or UTF-8 bytes) on stdout now, whatever encoding the locale asks for."""
    sys.stdout.buffer.write(data if isinstance(data, bytes) else data.encode("utf-8"))
    sys.stdout.buffer.flush()


class Text:
    """One sample as it grows: ids, and text in whole characters.

    A character's bytes may come in several tokens: `add` returns what is complete, and `end` turns
    an unfinished rest into U+FFFD.
    """

    def __init__(self, tokenizer, prompt, ids):
        self.tokenizer, self.ids, self.text = tokenizer, list(ids), prompt
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, i):
        """Take one more id; returns the text that it completes."""
        self.ids.append(i)
        return self.more(self.decoder.decode(self.tokenizer.decode_bytes([i])))

    def end(self):
        """The text's last piece: U+FFFD if it stops within a character."""
        return self.more(self.decoder.decode(b"", final=True))

    def more(self, piece):
        self.text += piece
        return piece

    def line(self):
        """The JSON line of --json."""
        return json.dumps({"ids": self.ids, "text": self.text}) + "\n"


def generate(s, model, tokenizer):
    """Write --num samples to stdout, the first of each group as it comes; returns new tokens."""
    prompt, ids = prompt_of(s.prompt, tokenizer)
    count, context = 0, model.config.max_seq
    for first in range(0, s.num, AT_ONCE):
        texts = [Text(tokenizer, prompt, ids) for _ in range(first, min(s.num, first + AT_ONCE))]
        live = not s.json
        if live:
            write(separator(first) + prompt)
        steps = xtrain.generate_batch(model, ids, s.max_new, s.temperature, s.top_k, s.top_p,
                                      s.seed, range(first, first + len(texts)), tokenizer.eot)
        for n, new in enumerate(steps, 1):
            # said once, where the text first leaves what the model was trained on
            if len(ids) + n > context:
                say(f"past the context of {context} tokens, where the model was not trained: the "
                    "text may get worse")
                context = float("inf")
            pieces = [text.add(i) if i is not None else "" for text, i in zip(texts, new)]
            count += sum(i is not None for i in new)
            if live:
                write(pieces[0])
        finish(texts, first, s.json)
    if not s.json and sys.stdout.isatty():
        write("\n")
    return count


def separator(number):
    """What stands before sample `number`: a line `---` between two."""
    return "\n---\n" if number else ""


def finish(texts, first, as_json):
    """Write what is missing of a group of samples: all but the first are not on stdout yet."""
    rest = [text.end() for text in texts]
    if as_json:
        write("".join(text.line() for text in texts))
        return
    write(rest[0])
    for number, text in enumerate(texts[1:], first + 1):
        write(separator(number) + text.text)


# ---- 4. Other uses -------------------------------------------------------------------------------

def measure(s, model, tokenizer):
    """--eval: print the loss of a text in nats per token and in bits per byte."""
    try:
        with open(s.eval, encoding="utf-8", newline="") as f:
            ids = tokenizer.encode(f.read())
    except UnicodeDecodeError as e:
        raise Refused(f"--eval {s.eval}: not UTF-8 at byte {e.start}: convert it, for example "
                      "with iconv") from None
    except OSError as e:
        raise Refused(f"--eval {s.eval}: {e.strerror}") from None
    if len(ids) < 2:
        raise Refused(f"--eval {s.eval}: {len(ids)} tokens, at least 2 are needed: one to read, "
                      "one to predict")
    seq = min(model.config.max_seq, len(ids) - 1)
    loss, bits = xtrain.evaluate(model, ids, tokenizer.lengths, seq)
    if s.json:
        write(json.dumps({"loss": loss, "bits_per_byte": bits, "tokens": len(ids) - 1}) + "\n")
    else:
        write(f"loss {loss:.6f} nats per token, {bits:.6f} bits per byte ({len(ids) - 1} tokens in "
              f"windows of {seq})\n")


def export(s, model, tokenizer):
    """--export: write a Hugging Face folder, all of it or nothing."""
    dtype = "f32" if s.dtype == "auto" else s.dtype
    try:
        xtrain.publish(s.export, lambda folder: xtrain.save_pretrained(model, folder, dtype,
                                                                       tokenizer))
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise Refused(f"--export {s.export}: {e.strerror}: name a folder in one that exists and "
                      "that you may write to") from None
    say(f"wrote {s.export} ({dtype})")


def check_export(path):
    """Refused if --export would write over something: asked before anything is loaded."""
    if os.path.exists(path) and not os.path.isdir(path):
        raise Refused(f"--export {path}: is a file; name a new folder")
    if os.path.isdir(path) and os.listdir(path):
        raise Refused(f"--export {path}: exists and is not empty; name a new folder, or empty it")


# ---- 5. Main -------------------------------------------------------------------------------------

def main(argv):
    """Do what the flags ask."""
    s = read_settings(argv)
    if s.export is not None:
        check_export(s.export)
    model, tokenizer = load(s.model, s.dtype, s.device)
    if s.eval is not None:
        measure(s, model, tokenizer)
    if s.export is not None:
        export(s, model, tokenizer)
    if s.eval is None and s.export is None:
        start = time.perf_counter()
        count = generate(s, model, tokenizer)
        seconds = time.perf_counter() - start
        if sys.stderr.isatty():
            say(f"{count} new tokens / {seconds:.2f} s = {count/seconds:.1f} tokens/s (prompt "
                "included)")


if __name__ == "__main__":
    sys.exit(xtrain.exit_code(main, sys.argv[1:], "a smaller --max-new, --num or model"))
