"""`mw.catalog`: listings of the catalogue, and the look-ups of `meshwright.catalog.lookup`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.api import arguments
from meshwright.catalog.lookup import *  # noqa: F403 - its `__all__` is part of the public interface

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
    from meshwright.answers.catalog_listing import catalog_listing

    return catalog_listing("models")


def accelerators() -> CatalogListing:
    """List all accelerators with dense peak rates, memory and links.

    Returns:
        A listing. Iterating yields the names; `listing[name]` has every value of one entry with its source.

    Example:
        >>> import meshwright as mw
        >>> mw.catalog.accelerators()["h100"].values["memory_bytes"] > 80e9
        True
    """
    from meshwright.answers.catalog_listing import catalog_listing

    return catalog_listing("accelerators")


def clusters() -> CatalogListing:
    """List all fabrics that clusters are made of. `listing["h100-8x4"]` is a whole cluster.

    Returns:
        A listing. Iterating yields the names of the fabrics.

    Example:
        >>> import meshwright as mw
        >>> mw.catalog.clusters()["h100-8x4"].document["computed"]["num_devices"]
        32
    """
    from meshwright.answers.catalog_listing import catalog_listing

    return catalog_listing("clusters")


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
    from meshwright.answers.catalog_listing import catalog_listing

    return catalog_listing("claims", predict=arguments.flag("predict", predict))


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
    from meshwright.answers.catalog_listing import catalog_listing

    return catalog_listing("runs", predict=arguments.flag("predict", predict))
