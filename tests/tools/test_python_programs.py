"""Ordinary programs run at every level: files, threads, processes, databases, libraries."""

from __future__ import annotations

import pytest

from agent_r1.tools.python.sandbox import Sandbox
from tests.tools.python_boxes import boxes as boxes
from tests.tools.python_boxes import roomy as roomy
from tests.tools.python_boxes import run

PROGRAMS = {
    "pure": (
        """
        import collections, datetime, decimal, fractions, itertools, json, math, random, re, statistics, time
        time.sleep(0.01)
        print(json.dumps({"a": [1, None]}), re.sub("a+", "b", "caat"), math.comb(50, 3), random.randint(1, 1))
        print(decimal.Decimal("0.1") + 1, fractions.Fraction(1, 3), statistics.mean([1, 2]), time.time() > 1e9)
        print(datetime.datetime.now().astimezone().year > 2000, time.process_time() >= 0)
        """,
        '{"a": [1, null]} cbt 19600 1\n1.1 1/3 1.5 True\nTrue True\n',
    ),
    "files": (
        """
        import glob, gzip, mmap, os, pathlib, shutil, tarfile, tempfile, zipfile
        os.chdir(tempfile.mkdtemp())
        pathlib.Path("a").write_text("x" * 100_000)
        shutil.copy2("a", "b"); os.rename("b", "c"); os.link("c", "d"); os.symlink("c", "e"); os.truncate("c", 5)
        os.mkdir("f"); shutil.copytree("f", "g"); os.chmod("c", 0o600); pathlib.Path("h").touch(); os.mkfifo("i")
        with zipfile.ZipFile("z.zip", "w") as file: file.write("c")
        with tarfile.open("t.tgz", "w:gz") as file: file.add("c")
        with tarfile.open("t.tgz") as file: file.extractall("g")
        with gzip.open("j.gz", "wb") as file: file.write(b"x")
        with open("c", "r+b") as file, mmap.mmap(file.fileno(), 0) as view: view[0] = 65; view.flush()
        with tempfile.TemporaryFile() as file: file.write(b"x")
        print(open("d").read(), sorted(glob.glob("*")), os.listdir("g"), os.stat("a").st_size)
        print(shutil.disk_usage(".").total > 0)
        shutil.rmtree(os.getcwd())
        """,
        "Axxxx ['a', 'c', 'd', 'e', 'f', 'g', 'h', 'i', 'j.gz', 't.tgz', 'z.zip'] ['c'] 100000\nTrue\n",
    ),
    "sqlite": (
        """
        import sqlite3, tempfile
        for place in (":memory:", tempfile.mkdtemp() + "/data"):
            base = sqlite3.connect(place)
            base.execute("create table t (a)")
            base.execute("insert into t values (1)")
            base.commit()
            print(base.execute("pragma journal_mode=wal").fetchone(), base.execute("select * from t").fetchall())
        """,
        "('memory',) [(1,)]\n('wal',) [(1,)]\n",
    ),
    "threads": (
        """
        import queue, threading
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(3) as pool: print(list(pool.map(lambda n: n * n, range(5))))
        answers, event = queue.Queue(), threading.Event()
        thread = threading.Thread(target=lambda: answers.put(event.wait(5)), name="named"); thread.start()
        event.set(); thread.join(); print(answers.get())
        """,
        "[0, 1, 4, 9, 16]\nTrue\n",
    ),
    "asyncio": (
        """
        import asyncio, sys
        async def main():
            program = (sys.executable, "-I", "-S", "-c", "print(7)")
            process = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE)
            said, _ = await process.communicate()
            return await asyncio.gather(asyncio.to_thread(pow, 3, 2), asyncio.sleep(0.01, 4)), said
        print(asyncio.run(main()))
        """,
        "([9, 4], b'7\\n')\n",
    ),
    "subprocesses": (
        """
        import os, subprocess, sys
        run = lambda code: subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, timeout=50)
        print(run("import json, ssl, threading; print(6 * 7)").stdout, run("raise SystemExit(3)").returncode)
        try:
            subprocess.run(["/no/such/program"])
        except FileNotFoundError as error:
            print(error.strerror)
        child = os.fork() or os._exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
        "b'42\\n' 3\nNo such file or directory\n5\n",
    ),
    "multiprocessing": (
        """
        import math, multiprocessing
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import shared_memory
        def square(number): return number * number
        fork = multiprocessing.get_context("fork")
        with fork.Pool(2) as pool: print(pool.map(square, range(4)))
        with ProcessPoolExecutor(2, mp_context=fork) as pool: print(list(pool.map(square, range(4))))
        with multiprocessing.get_context("spawn").Pool(1) as pool: print(pool.map(math.sqrt, [4.0]))
        ours, theirs = fork.Pipe(); ours.send([1]); print(theirs.recv())
        queue, value = fork.Queue(), fork.Value("i", 3); queue.put(value.value); print(queue.get())
        memory = shared_memory.SharedMemory(create=True, size=10); memory.close(); memory.unlink()
        """,
        "[0, 1, 4, 9]\n[0, 1, 4, 9]\n[2.0]\n[1]\n3\n",
    ),
    "signals": (
        """
        import faulthandler, os, resource, signal, time
        signal.signal(signal.SIGALRM, lambda *_: print("rang"))
        signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.2)
        signal.raise_signal(signal.SIGALRM); os.kill(os.getpid(), signal.SIGALRM)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0)
        """,
        "rang\nrang\nrang\nTrue\n",
    ),
    "machine": (
        """
        import ctypes, os, platform, secrets, shutil, sys, tracemalloc, uuid
        print(platform.system(), os.cpu_count() > 0, len(os.sched_getaffinity(0)) > 0, shutil.get_terminal_size().lines)
        print(len(secrets.token_hex(4)), len(os.urandom(3)), len(str(uuid.uuid4())), sys.stdout.isatty())
        blocks = [bytes(10**6) for _ in range(50)]; grown = bytearray(); [grown.extend(b) for b in blocks]
        print(len(grown), ctypes.CDLL(None).getpid() == os.getpid())
        """,
        "Linux True True 24\n8 3 36 False\n50000000 True\n",
    ),
    "numpy": (
        """
        import numpy as np, tempfile
        place = tempfile.mkdtemp()
        print(np.allclose(np.linalg.svd(np.diag([3.0, 2.0]))[1], [3, 2]), np.zeros(4_000_000).sum(), np.fft.fft([1, 0]))
        np.save(place + "/a.npy", np.arange(1000)); print(np.load(place + "/a.npy", mmap_mode="r").sum())
        (np.random.default_rng(0).random((300, 300)) @ np.ones((300, 300))).shape
        """,
        "True 0.0 [1.+0.j 1.+0.j]\n499500\n(300, 300)\n",
    ),
    "sympy": (
        """
        from sympy import *
        x = symbols("x")
        print(solve(x**3 - 6*x**2 + 11*x - 6), integrate(sin(x) * exp(x), x), N(pi, 30), Matrix([[1, 2], [3, 4]]).inv())
        """,
        "[1, 2, 3] exp(x)*sin(x)/2 - exp(x)*cos(x)/2 3.14159265358979323846264338328 Matrix([[-2, 1], [3/2, -1/2]])\n",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_ordinary_programs_run(roomy: Sandbox, name: str) -> None:
    if name in ("numpy", "sympy"):
        pytest.importorskip(name)
    code, expected = PROGRAMS[name]
    outcome = run(roomy, code)
    assert (outcome.stdout, outcome.error) == (expected, None)
