"""Reads the images of a request for the model that is to see them, or says in a line why it cannot.

Rule: off the event loop and off the text thread, one image after the other for all requests; what
is read for requests that are not answered yet has a bound together.
"""

import asyncio
from collections.abc import Mapping

from mlxspec import log
from mlxspec.server.content import READS_TEXT, File, line_for
from mlxspec.server.errors import invalid
from mlxspec.server.fetch import FetchError, fetch
from mlxspec.server.state import TextModel
from mlxspec.text.images import MAX_IMAGES, ImageError, Images
from mlxspec.types import Image

FETCHED_BYTES = 20 << 20  # of an image that is fetched


async def read_images(
    model: TextModel,
    files: Mapping[str, File],
    ignored: list[str],
    where: str = "messages",
) -> Images:
    """The images of these files by their digests, or the line in the place of each that the model
    cannot see, whose type goes to `ignored`. `where` is the body's field that has them. Raises
    ApiError for too many, and Busy where other requests hold large ones."""
    if len(files) > MAX_IMAGES:
        why = f"{where} has {len(files)} images, more than {MAX_IMAGES}; send fewer"
        raise invalid(where, why)
    images: dict[str, Image | str] = {}
    lost: list[str] = []
    for digest, file in files.items():
        try:
            images[digest] = await _read(model, digest, file)
        except ImageError as error:
            images[digest] = line_for(file.kind, str(error))
            lost.append(f"content[].{file.kind}")
    if lost:
        lost = [*dict.fromkeys(lost)]
        log.info("left out of the prompt: %s", ", ".join(lost))
        ignored += lost
    return images


async def _read(model: TextModel, digest: str, file: File) -> Image:
    """Raises ImageError and Busy."""
    cache, state = model.image_cache, model.server
    if cache is None or not model.info.sees:
        raise ImageError(READS_TEXT)
    if file.why:
        raise ImageError(file.why)
    run = asyncio.get_running_loop().run_in_executor
    image = await run(state.imaging, cache.get, digest)
    if image:
        return image
    if not file.url:
        return await run(state.imaging, cache.read, digest, file.data)
    if not state.config.fetch_images:
        raise ImageError("it is a URL, and this server does not fetch: --fetch-images is off")

    def fetched() -> Image:
        """No more files wait to be read than threads fetch."""
        data = fetch(file.url, FETCHED_BYTES)
        return state.imaging.submit(cache.read, digest, data).result()

    try:
        return await run(state.fetching, fetched)
    except FetchError as error:
        raise ImageError(str(error)) from error
