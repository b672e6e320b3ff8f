"""`mw.catalog`: listings of the catalogue, and the look-ups of `meshwright.catalog.lookup`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.api import arguments
from meshwright.catalog.lookup import *  # noqa: F403 - its names are part of the public interface

if TYPE_CHECKING:
    from meshwright.answers.catalog_listing import CatalogListing


def models() -> CatalogListing:
    """List all models with their parameters and shapes.

    Returns:
        A listing. Iterating yields the names; `listing[name]` has every value of one entry with its source.

    Example:
        >>> import meshwright as mw
        >>> "llama3-8b" in mw.catalog.models().names
        True
        >>> mw.catalog.models()["llama3-8b"].values["num_layers"]
        32
    """
    return _listing("models")


def accelerators() -> CatalogListing:
    """List all accelerators with dense peak rates, memory and links.

    Returns:
        A listing. Iterating yields the names; `listing[name]` has every value of one entry with its source.

    Example:
        >>> import meshwright as mw
        >>> mw.catalog.accelerators()["h100"].values["memory_bytes"] > 80e9
        True
    """
    return _listing("accelerators")


def clusters() -> CatalogListing:
    """List all fabrics that clusters are made of. `listing["h100-8x4"]` is a whole cluster.

    Returns:
        A listing. Iterating yields the names of the fabrics.

    Example:
        >>> import meshwright as mw
        >>> mw.catalog.clusters()["h100-8x4"].document["computed"]["num_devices"]
        32
    """
    return _listing("clusters")


def claims(*, predict: bool = False) -> CatalogListing:
    """List all published claims.

    Args:
        predict: also compute the claims that can be computed; this takes half a minute.

    Returns:
        A listing. Iterating yields the identifiers; `listing[claim_id]` is one claim.

    Example:
        >>> import meshwright as mw
        >>> mw.catalog.claims()["scale_06"].kind
        'claims'
    """
    return _listing("claims", predict=predict)


def runs(*, predict: bool = False) -> CatalogListing:
    """List the run files that ship. Every function takes their names for a run.

    Args:
        predict: also estimate each on the accelerators of the published documents; this takes half a minute.

    Returns:
        A listing. Iterating yields the names; `listing[name].document["text"]` is a run file.

    Example:
        >>> import meshwright as mw
        >>> "llama3-8b" in mw.catalog.runs().names
        True
    """
    return _listing("runs", predict=predict)


def _listing(kind: str, **asked: bool) -> CatalogListing:
    from meshwright.answers.catalog_listing import catalog_listing

    return catalog_listing(kind, **{name: arguments.flag(name, value) for name, value in asked.items()})
