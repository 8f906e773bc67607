"""Texts that would act if a page parsed them, broke its layout, or lied about their order."""

MARK = "acted"
"""What payloads that run would call: a request, a dialog or a variable with this name."""

_SCRIPTS = (
    f"<script>alert('{MARK}')</script>",
    f"</script><script>window.{MARK}=1</script>",
    f"<img src=x onerror=alert('{MARK}')>",
    f"<img/src='x'onerror=window.{MARK}=1//>",
    f"<svg onload=alert('{MARK}')>",
    f"<svg><script>alert('{MARK}')</script></svg>",
    f"<svg><animate onbegin=alert('{MARK}') attributeName=x dur=1s>",
    f"<svg><a xlink:href=\"javascript:alert('{MARK}')\"><text y=20>x</text></a></svg>",
    f"<math><mtext><table><mglyph><style><img src=x onerror=alert('{MARK}')>",
    f"<math href=\"javascript:alert('{MARK}')\">x</math>",
    f"<iframe srcdoc=\"<script>alert('{MARK}')</script>\"></iframe>",
    f"<iframe src=\"javascript:alert('{MARK}')\"></iframe>",
    f"<object data=\"javascript:alert('{MARK}')\"></object>",
    f"<embed src=\"javascript:alert('{MARK}')\">",
    f"<body onload=alert('{MARK}')>",
    f"<details open ontoggle=alert('{MARK}')>",
    f"<input autofocus onfocus=alert('{MARK}')>",
    f"<video><source onerror=alert('{MARK}')></video>",
    f"<marquee onstart=alert('{MARK}')>x</marquee>",
    f"<a href=\"javascript:alert('{MARK}')\">x</a>",
    f"javascript:alert('{MARK}')",
    f"data:text/html,<script>alert('{MARK}')</script>",
    f"'-alert('{MARK}')-'",
    f'"-alert("{MARK}")-"',
    f"\\'-alert('{MARK}')//",
    f"${{alert('{MARK}')}}",
    f"{{{{constructor.constructor(\"alert('{MARK}')\")()}}}}",
    f"<%= alert('{MARK}') %>",
    f"#{{alert('{MARK}')}}",
    f"<template><img src=x onerror=alert('{MARK}')></template>",
    f"<noscript><p title=\"</noscript><img src=x onerror=alert('{MARK}')>\">",
    f"<form><button formaction=\"javascript:alert('{MARK}')\">x</button></form>",
    f"<isindex action=\"javascript:alert('{MARK}')\" type=submit>",
    f"<base href='https://{MARK}.example/'>",
    f"<link rel=stylesheet href='https://{MARK}.example/x.css'>",
    f"<meta http-equiv=refresh content='0;url=https://{MARK}.example/'>",
    f"<style>@import 'https://{MARK}.example/x.css';</style>",
    f'<div style="background:url(https://{MARK}.example/x)">x</div>',
    f"<img src=https://{MARK}.example/x.png>",
    f"![x](https://{MARK}.example/x.png)",
    f"[x](javascript:alert('{MARK}'))",
    f"<<script>alert('{MARK}')//<</script>",
    f"<scr<script>ipt>alert('{MARK}')</scr</script>ipt>",
    f"<!--><img src=x onerror=alert('{MARK}')>-->",
    f"<![CDATA[><script>alert('{MARK}')</script>]]>",
    f"&lt;script&gt;alert('{MARK}')&lt;/script&gt;",
    f'<p id="header"><p name="body"><img name=createElement src=x onerror=alert(\'{MARK}\')>',
)
_NAMES = ("__proto__", "constructor", "toString", "hasOwnProperty", "../../v1/training/stop", "a/b?c#d&e=f")
_CHARACTERS = (
    "NUL \x00 and bell \x07",
    "half \ud83d of a character",
    "right to left \u202e gnp.exe \u2066 isolate",
    "zero\u200bwidth\ufeff joiner\u200d",
    "escape \x1b[31mred\x1b[0m \x1b]0;title\x07",
    "tag characters \U000e0041\U000e0042",
    "combining " + "e" + "\u0301" * 10_000,
)
HOSTILE_TEXTS = (*_SCRIPTS, *_NAMES, *_CHARACTERS)
LONG_TEXT = "x" * 1_000_000
"""A megabyte without a space."""
