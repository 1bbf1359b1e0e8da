"""What the images of a request would cost to decode, by their headers, before any of them is decoded."""

from vitkit.data.decode import jpeg_scans, pixels_by_header
from vitkit.service.refusal import Refusal
from vitkit.service.settings import MOST_SCANS, Settings

Images = list[tuple[str, bytes]]  # names and encoded images


def check_cost(images: Images, settings: Settings) -> None:
    """Refuse a request that would keep decoders from others: JPEGs of many scans, or too many pixels in all.

    An image that is too large by itself is left to the decoder, which names it in its place of the answer.
    """
    for name, content in images:
        if jpeg_scans(content, MOST_SCANS) > MOST_SCANS:
            raise Refusal(
                422,
                f"{name!r} is a JPEG of more than {MOST_SCANS} scans, each a pass over all its pixels; "
                "save it again, as baseline or as an ordinary progressive JPEG",
                code="image.too-large",
            )
    sizes = [pixels_by_header(content) for _, content in images]
    total = sum(size for size in sizes if size <= settings.max_pixels)
    if total > settings.request_pixels:
        raise Refusal(
            413,
            f"the images of this request have {total} pixels together; at most {settings.request_pixels} "
            "are decoded for one request: send them in several",
        )
