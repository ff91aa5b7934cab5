"""Builds fast_cpu.pyx: one translation to C, one compilation of that C per instruction set.

How it reads, top to bottom:

1. The build        translate, compile as many at a time as there are cores, put into place
2. What to build    the table in tensor.py, and the compiler flags of each of its rows
3. The compiler     what it can do is tried on a few lines of C, never guessed from its version
4. Hand-over        the call that gives this to setuptools; all that is fixed is in pyproject.toml

`pip install -e .` and `python setup.py build_ext --inplace` leave isa/<name>/fast_cpu.<suffix>
here, `pip install .` leaves the same beside tensor.py in site-packages; tensor.py picks one at
import.  build/isa/ keeps each result with a hash of all that it was made from, so that nothing is
compiled twice.  CC, CFLAGS and LDFLAGS are respected; XTRAIN_BUILD=avx2,avx512 builds those alone.

Two flags are never passed: -march=native (the file would crash on an older machine) and
-ffast-math (it flushes denormals to zero in the whole process, and loses NaN).
"""
import ast
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FILE = "fast_cpu" + sysconfig.get_config_var("EXT_SUFFIX")
INCLUDES = ["-I" + sysconfig.get_path(key) for key in ("include", "platinclude")]

# They follow Python's own flags and so win over those.  -g0 undoes a -g there (25 % of the time).
# Inline functions are templates here: their constant arguments must reach the loops.
FLAGS = ["-O3", "-g0", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fwrapv",
         "-DCYTHON_INLINE=inline __attribute__((always_inline))"]


# ---- 1. The build -------------------------------------------------------------------------------

class BuildInstructionSets(build_ext):
    """setuptools' `build_ext` with one C file for all extensions and flags tried beforehand."""

    def build_extensions(self):
        """The whole build; setuptools calls this once it knows the compiler."""
        check_compiler(self.compiler)
        self.openmp = find_openmp(self.compiler)
        self.extensions = [e for e in self.extensions if understood(self.compiler, e)]
        self.c_file = translate()
        shutil.rmtree(Path(self.build_lib, "isa"), ignore_errors=True)  # of an earlier build
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self.build_extension, self.extensions))
        if os.path.exists("kernels.cu"):        # tensor.py reads it at run time, so it goes along
            self.copy_file("kernels.cu", self.build_lib)

    def build_extension(self, ext):
        """Put the result for one instruction set where setuptools wants it, made now or before."""
        name = set_name(ext)
        built, target = Path("build", "isa", name, FILE), Path(self.get_ext_fullpath(ext.name))
        steps = self.commands(ext, str(built))
        stamp, made_from = built.with_suffix(".hash"), self.fingerprint(steps)
        # The stamp is written last, so an interrupted build has none.
        if built.exists() and stamp.exists() and stamp.read_text() == made_from:
            say(f"{name}: unchanged")
        else:
            stamp.unlink(missing_ok=True)
            self.compile(name, built, steps)
            stamp.write_text(made_from)
        target.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(built), str(target))

    def commands(self, ext, built):
        """The two command lines, compile and link, that make the file `built`."""
        compile_openmp, link_openmp = self.openmp
        flags = FLAGS + ext.extra_compile_args + compile_openmp + INCLUDES
        return (
            [*self.compiler.compiler_so, *flags, "-c", self.c_file, "-o", built + ".o"],
            [*self.compiler.linker_so, built + ".o", *link_openmp, "-o", built],
        )

    def fingerprint(self, steps):
        """A hash of all that decides a result: the C, the command lines, the compiler's version."""
        version = subprocess.run([*self.compiler.compiler_so, "--version"], capture_output=True)
        made_from = Path(self.c_file).read_bytes() + repr(steps).encode() + version.stdout
        return hashlib.sha256(made_from).hexdigest()

    def compile(self, name, built, steps):
        """Run the command lines; a failure ends the build with the compiler's words."""
        start = time.perf_counter()
        built.parent.mkdir(parents=True, exist_ok=True)
        for step in steps:
            stop_if(complaint(step), f"{name} does not compile; {' '.join(step)}")
        say(f"{name}: compiled in {time.perf_counter() - start:.1f} s")

    def copy_extensions_to_source(self):
        """Editable and --inplace: fill isa/ with this build alone; an older one must not load."""
        for old in Path("isa").glob("*/" + FILE):
            old.unlink()
        for ext in self.extensions:
            Path("isa", set_name(ext)).mkdir(parents=True, exist_ok=True)
        super().copy_extensions_to_source()


def translate():
    """Cythonize fast_cpu.pyx into build/ unless that is up to date; returns the C file's path."""
    import Cython                       # here, because the package's metadata can be had without it
    from Cython.Build import cythonize
    from Cython.Compiler.Errors import CompileError
    try:                                # a folder per version: another Cython writes another C file
        modules = cythonize("fast_cpu.pyx", build_dir=f"build/cython-{Cython.__version__}")
    except CompileError:
        stop_if("Cython's messages are above", "fast_cpu.pyx cannot be translated to C")
    return modules[0].sources[0]


# ---- 2. What to build ---------------------------------------------------------------------------

def extensions():
    """One extension, isa.<name>.fast_cpu, for each row of the table that is wanted here."""
    table = instruction_sets()
    if platform.machine().lower() not in ("x86_64", "amd64"):
        table = {"baseline": ()}        # plain C vectors, which the compiler maps to what is there
    wanted = os.environ.get("XTRAIN_BUILD", "").replace(",", " ").split() or list(table)
    unknown = [name for name in wanted if name not in table]
    stop_if(" ".join(unknown), f"XTRAIN_BUILD may name {' '.join(table)}, but not")
    return [extension(name, table[name]) for name in wanted]


def extension(name, features):
    """The setuptools extension of one row; `depends` only takes a file along in source archives."""
    return Extension(f"isa.{name}.fast_cpu", ["fast_cpu.pyx"], depends=["kernels.cu"],
                     extra_compile_args=compiler_flags(features))


def set_name(ext):
    """isa.avx2.fast_cpu -> avx2"""
    return ext.name.split(".")[1]


def instruction_sets():
    """INSTRUCTION_SETS of tensor.py, read as text: tensor.py imports what is only built here."""
    for node in ast.parse(Path("tensor.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "INSTRUCTION_SETS":
            return ast.literal_eval(node.value)
    stop_if("no such assignment", "tensor.py must hold INSTRUCTION_SETS = {name: (features, ...)}")


def compiler_flags(features):
    """/proc/cpuinfo's names as flags: avx512_bf16 -> -mavx512bf16, amx_tile -> -mamx-tile."""
    flags = ["-m" + name.replace("amx_", "amx-").replace("_", "") for name in features]
    # Left alone, GCC stays at 256 bits in the loops that it vectorises by itself.
    return flags + ["-mprefer-vector-width=512"] * ("avx512f" in features)


# ---- 3. The compiler ----------------------------------------------------------------------------

NO_COMPILER = """building xtrain takes a C compiler and Python's headers; install them with
  Debian, Ubuntu:  sudo apt install gcc python3-dev
  Fedora:          sudo dnf install gcc python3-devel
  macOS:           xcode-select --install
or name your own compiler in CC. What went wrong"""


def check_compiler(compiler):
    """Stop, saying what to install, unless a file that includes Python.h compiles and links."""
    stop_if(attempt(compiler, "#include <Python.h>\n", INCLUDES, []), NO_COMPILER)


def find_openmp(compiler):
    """The flags (compile, link) that give OpenMP here; two empty lists if nothing does."""
    source = "#include <omp.h>\nint threads(void) { return omp_get_max_threads(); }\n"
    for compile_args, link_args in openmp_choices():
        if not attempt(compiler, source, compile_args, link_args):
            return compile_args, link_args
    say("no OpenMP with this compiler, so the build uses one thread (macOS: brew install libomp)")
    return [], []


def openmp_choices():
    """What to try: the usual flag, then Apple's clang with the library from Homebrew."""
    yield ["-fopenmp"], ["-fopenmp"]
    if sys.platform == "darwin" and shutil.which("brew"):
        asked = subprocess.run(["brew", "--prefix", "libomp"], capture_output=True, text=True)
        prefix = asked.stdout.strip()
        yield ["-Xpreprocessor", "-fopenmp", f"-I{prefix}/include"], [f"-L{prefix}/lib", "-lomp"]


def understood(compiler, ext):
    """Whether the compiler knows an extension's flags; if not, a line says that it is skipped."""
    error = attempt(compiler, "int nothing;\n", ext.extra_compile_args)
    if error:
        say(f"{set_name(ext)}: skipped, this compiler does not know it: {error.splitlines()[0]}")
    return not error


def attempt(compiler, source, compile_args, link_args=None):
    """Compile a few lines of C, link them too if link_args is given; what went wrong, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        c_file, o_file, so_file = (os.path.join(folder, "try" + end) for end in (".c", ".o", ".so"))
        Path(c_file).write_text(source)
        error = complaint([*compiler.compiler_so, *compile_args, "-c", c_file, "-o", o_file])
        if not error and link_args is not None:
            error = complaint([*compiler.linker_so, o_file, *link_args, "-o", so_file])
    return error


def complaint(command):
    """Run a command line: "" if it went well, otherwise what it printed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    return (done.stderr or done.stdout or "no message") if done.returncode else ""


def say(line):
    """One line to stderr; pip shows it with -v, or when the build fails."""
    sys.stderr.write(f"xtrain: {line}\n")       # print() would write the line's end separately


def stop_if(reason, message):
    """End the build with a message and no traceback, if there is a reason to."""
    if reason:
        sys.exit(f"xtrain: error: {message}: {reason.strip()}")


# ---- 4. Hand-over -------------------------------------------------------------------------------

if sys.platform == "win32":
    sys.exit("xtrain: error: xtrain builds on Linux and macOS; on Windows, install it inside WSL")
if sys.platform == "darwin":            # python.org's Python would compile for two processors
    os.environ.setdefault("ARCHFLAGS", f"-arch {platform.machine()}")
setup(ext_modules=extensions(), cmdclass={"build_ext": BuildInstructionSets})
