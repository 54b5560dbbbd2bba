"""`objective.shell` gives a command the words that bash gives it, or says why it does not know them."""

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_plugins.objective.shell import commands
from composer_plugins.objective.shell_words import Word

NAMES = st.sampled_from(["a", "b", "c"])
TEXTS = st.sampled_from(
    ["x", "1", "k=v", "'p q'", '"p q"', r"p\ q", "''", "[1,2]", '"$a"', "$b", "${c}", "u${a}v"]
)
MORE = st.sampled_from(
    [
        "${a:-x y}",
        '"${b:-$c}"',
        "${c-'d e'}",
        "${a:+set}",
        '"${b+q r}"',
        "${#c}",
        "$((2 + 3 * 4))",
        "$(( -7 / 2 ))",
    ]
    + [
        '"${d[@]}"',
        "${d[@]}",
        '"${d[*]}"',
        "$d",
        "${d[1]}",
        "${#d[@]}",
        '"p${d[@]}q"',
        '"$@"',
        "$1",
        r'"\$a\"b\x"',
    ]
    + ['"${e%.sh}"', "${e%.*}", "${e%%.*}", "${e##*/}", "${e#*/}", '"${e/run/$c}"', "${e//./_}", "${e%$c}"]
    + ["${e/n?.s/}", '"${a%x}"']
)
WORDS = TEXTS | MORE
CONDITIONS = st.sampled_from(
    ['[ "$a" = x ]', '[[ $b == "p q" ]]', '[ -z "$c" ]', '[ -n "$a" ]', "! true", '[ "${#d[@]}" -gt 1 ]']
    + ['[[ -z $a || $b != "x" ]]', '[ "$a" = x ] && [ "$b" = x ]', '[ "$c" = 1 ] || [ "$c" = x ]']
)
SIMPLE = st.one_of(
    st.builds("{}={}".format, NAMES, WORDS),
    st.builds("{}+={}".format, NAMES, TEXTS),
    st.builds("d=({} {})".format, WORDS, WORDS),
    st.builds("d+=({})".format, WORDS),
    st.builds("f {} {}".format, WORDS, WORDS),
    st.builds("set -- {}".format, WORDS),
    st.builds("show {} \\\n  {}".format, WORDS, WORDS),
    st.builds("( {}={}; show ${} )".format, NAMES, TEXTS, NAMES),
    st.sampled_from(['eval "c=1"', "eval 'b=$a'"]),
)
STATEMENTS = SIMPLE | st.one_of(
    st.builds("g {} {}".format, WORDS, WORDS),
    st.builds("if {}; then\n{}\nelse\n{}\nfi".format, CONDITIONS, SIMPLE, SIMPLE),
    st.builds("if {}; then\n{}\nelif {}; then {}; fi".format, CONDITIONS, SIMPLE, CONDITIONS, SIMPLE),
    st.builds("{} && {}".format, CONDITIONS, SIMPLE),
    st.builds("g() {{\nlocal a={}\n{}\nshow $a $1 $#\n}}".format, WORDS, SIMPLE),
)
HEAD = 'set --\na=x b= c=1 d=(x "y z") e=my/runs/run.v1.sh\nf() { show "$@"; }\ng() { f $1; }\n'


@settings(max_examples=150, deadline=None)
@given(st.lists(STATEMENTS, min_size=1, max_size=8))
def test_a_command_has_the_words_that_bash_gives_it(statements: list[str]) -> None:
    script = HEAD + "\n".join([*statements, 'show "$a" "$b" "$c" "${d[@]}" "$@"']) + "\n"
    words = script.replace("show ", "printf '%s\\0' begin ")  # a program, not a function
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False, timeout=20)
    found, wrong, _ = commands(words)
    ours = [["begin", *(one.text for one in command.words[3:])] for command in found]
    assert not wrong and not any(one.unknown for command in found for one in command.words)
    theirs = [call.split("\0")[:-1] for call in done.stdout.split("begin\0")[1:]]
    assert [call[1:] for call in ours] == theirs, script


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("p k=$HOME/x", [Word("k=$HOME/x", "HOME is not set in the script")]),
        ("p k=$(date +%s)", [Word("k=$(date +%s)", "the output of $(date +%s) is known at its run only")]),
        ("p $1", [Word("$1", "$1 is known at its run only")]),
        ("p $@ end", [Word("end")]),
        ("if [ -f a ]; then b=1; else b=2; fi; p $b", [Word("$b", "it depends on the condition in line 1")]),
        ("if [ -f a ]; then b=1; else exit 1; fi; p $b", [Word("1")]),
        ("case $X in\na) b=1;;\nesac\np $b", [Word("$b", "it depends on the condition in line 1")]),
        ("b=0\nfor i in 1 2; do b=$i; done; p $b", [Word("$b", "it changes in the loop of line 2")]),
        ("for i in 1 2; do p $i; done", [Word("$i", "it changes in the loop of line 1")]),
        ("while true; do b=1; done; p $b", [Word("$b", "it changes in the loop of line 1")]),
        ("n=1; ((n++)); p $n", [Word("$n", "the arithmetic of line 1 may change it")]),
        ("read b; p $b", [Word("$b", "read sets it in line 1")]),
        ("b=abc; p ${b%[c]}", [Word("${b%[c]}", "the expansion ${b%[c]} is not followed")]),
        ("p ${b%c}", [Word("${b%c}", "the expansion ${b%c} is not followed")]),
        ("b=$HOME; p ${b%c}", [Word("${b%c}", "HOME is not set in the script")]),
        ("b=(1 2); b[1]=3; p ${b[1]}", [Word("$b", "line 1 sets one element of the array")]),
        ("p +k={a,b}", [Word("+k={a,b}", "the shell makes several words of {...}: put it into quotes")]),
        ("p '+k={a,b}'", [Word("+k={a,b}")]),
        ("p $'a\\tb'", [Word("a\\tb", "a $'...' has an escape in it")]),
        ("p k=$((N * 2))", [Word("k=$((N * 2))", "$((N * 2)) cannot be computed here")]),
        ("bash -c 'p k=1'", [Word("k=1")]),
        ("p größe=ü", [Word("größe=ü")]),
        ("b=(1 # 2 'x\n  # b=3\n4)\np ${b[@]}", [Word("1"), Word("4")]),
        ("b=8; let b=b*2; p $b", [Word("$b", "let may change it in line 1")]),
        ("f() { local b; b=16; }; b=8; f; p $b", [Word("8")]),
        (
            "f() { local -n r=$1; r=2; }; b=1; f b; p $b",
            [Word("$b", "line 1 sets a variable by its name")],
        ),
        ("b=1; source x.sh; p $b", [Word("$b", "line 1 reads x.sh, which is not found here")]),
        ("source x.sh; p ${b:-1}", [Word("${b:-1}", "line 1 reads x.sh, which is not found here")]),
        ("b=1; source ~/.bashrc; . env/bin/activate; p $b", [Word("1")]),
        ('p "$(dirname "$0")/a"', [Word("/scripts/a")]),
        ('b=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\np $b/a', [Word("/scripts/a")]),
        (
            'p $(cd "$(dirname "$0")/.." && pwd)',
            [
                Word(
                    '$(cd "$(dirname "$0")/.." && pwd)',
                    'the output of $(cd "$(dirname "$0")/.." && pwd) is known at its run only',
                )
            ],
        ),
    ],
)
def test_what_is_not_known_says_why(script: str, words: list[Word]) -> None:
    found, wrong, _ = commands(script.replace("\n", "\r\n"), folder="/scripts")
    (command,) = (one for one in found if one.words[0].text == "p")
    assert command.words == (Word("p"), *words) and not wrong


def test_what_a_command_is_given_as_environment() -> None:
    (one, other), *_ = commands("export A=1; B=2; X=$Y C=3 p\np")
    assert one.exported == (("A", "1"), ("C", "3")) and other.exported == (("A", "1"),)


def test_a_line_that_is_not_bash_is_named() -> None:
    assert commands("p a\n)(\np b\n")[1] == [2]


def test_a_file_that_is_sourced_sets_variables() -> None:
    files = {"env.sh": "b=2  # ü\nexport D=4\n"}
    script = "b=1\nsource env.sh\np $b\nsource $X\n. ./none.sh\np $b"
    found, wrong, _ = commands(script, files.get)
    assert [(one.words[1:], one.line, one.exported) for one in found if one.words[0].text == "p"] == [
        ((Word("2"),), 3, (("D", "4"),)),
        ((Word("$b", "line 5 reads ./none.sh, which is not found here"),), 6, ()),
    ]
    assert not wrong
    loop = commands("source a.sh\np", {"a.sh": "source a.sh\nq"}.get)[0]
    assert {one.words[0].text for one in loop} >= {"p", "q"}


def test_a_recursion_ends() -> None:
    (command, *_), *_ = commands("f() { f; p; }\nf")
    assert command.words[0].text in ("f", "p")
