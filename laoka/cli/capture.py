"""`laoka capture`: a redacted, replayable bundle of one host, for a friend, a bug report or a test."""

from __future__ import annotations

import click

from laoka import __version__, checks
from laoka.cli.check import LOCAL, ssh_target
from laoka.cli.main import EXIT_FINE, said
from laoka.files import write_atomic
from laoka.host import collect
from laoka.host.bundle import write_bundle
from laoka.host.collect import CouldNotCollect
from laoka.host.redact import redact
from laoka.host.report import build
from laoka.host.sections import NotAProbe, Sections, parse, render


def bundle_of(sections: Sections) -> tuple[bytes, dict[str, int]]:
    """The capture of a probe and what was replaced in it.

    Errors: click.ClickException when the redacted text would be judged otherwise than the host itself.
    """
    cleaned, counts = redact(sections)
    live, again = (_judged(given) for given in (sections, cleaned))
    if live != again:
        changed = ", ".join(sorted({f"{check_id}" for check_id, *_ in live ^ again}))
        raise click.ClickException(f"the redacted capture would be judged otherwise ({changed}): please report this")
    report = build(cleaned)
    manifest: dict[str, object] = {
        "laoka": __version__,
        "epoch_s": report.probe.epoch_s if isinstance(report.probe.epoch_s, int) else None,
        "simulated": report.probe.simulated,
        "sections": sorted(cleaned.by_name),
        "replaced": counts,
    }
    return write_bundle(render(cleaned), manifest), counts


def _judged(sections: Sections) -> set[tuple[str, str, str]]:
    return {(finding.id, finding.severity, finding.case) for finding in checks.run(build(sections))}


@click.command()
@click.argument("target")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="File to write (.tar.gz).")
@click.option("-i", "key_file", type=click.Path(exists=True, dir_okay=False), help="SSH key file.")
@click.option("--jump", metavar="[USER@]HOST[:PORT]", help="SSH host in between.")
def command(target: str, output: str, key_file: str | None, jump: str | None) -> int:
    """Save what `laoka check` reads of a host, without names, addresses, serial numbers and secrets.

    TARGET is @local or [user@]host[:port]. `laoka check FILE` judges the capture as it would the host.
    """
    try:
        text = collect.text_of_this_machine() if target == LOCAL else collect.text_over_ssh(ssh_target(target, key_file, jump))
        data, counts = bundle_of(parse(text))
    except (CouldNotCollect, NotAProbe) as error:
        raise click.ClickException(str(error)) from None
    try:
        write_atomic(output, data, mode=0o600)
    except OSError as error:
        raise click.ClickException(f"{output}: {error.strerror}") from None
    replaced = ", ".join(f"{number} {kind}" for kind, number in counts.items()) or "0"
    click.echo(said("captured", file=output, size_bytes=len(data), replaced=replaced), err=True)
    return EXIT_FINE
