"""Images as people have them (files, bytes, data URIs, PIL images), each decoded once and refused if that fails."""

import base64
import hashlib
import io
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from rloo_kit.errors import DataError, describe_error, excerpt

Image.init()  # fills Image.OPEN
# Formats that Pillow reads without another program; AVIF from Pillow 11.3 on.
FORMATS = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "JPEG2000", *({"AVIF"} & Image.OPEN.keys())]
MOST_PIXELS = 89_478_485  # above, Pillow warns of a decompression bomb
MOST_ASPECT = 200  # longer side / shorter side; Qwen's processors refuse more
_CONVERT, _REPLACE = "convert it to PNG or JPEG", "replace it, or leave its row out"
_DAMAGED, _RENEW = "is damaged or of a rare kind", "save it again as PNG or JPEG, or leave its row out"
_TOO_MANY = f"and at most {MOST_PIXELS:,} are read; scale it down"
# How the bytes begin that Pillow does not open: what they are, and the fix. The first that matches counts.
_KINDS = [
    (rb"$", "is empty", _REPLACE),
    (rb"%PDF", "is a PDF", _CONVERT),
    (rb"%!PS|\xc5\xd0\xd3\xc6", "is an EPS", _CONVERT),
    (rb"....ftyp(hei|hev|mif1|msf1)", "is a HEIC", _CONVERT),
    (rb"....ftyp(?!avi)|\x1aE\xdf\xa3", "is a video", "save a frame of it as PNG or JPEG"),
    (rb"version https://git-lfs", "is a Git LFS pointer, not the file", "run `git lfs pull` in its folder"),
    (rb"(?i)<(!doctype )?html", "is an HTML page, such as a failed download leaves", "save the image itself"),
    (rb"(?i)<svg|<[?!].*<svg", "is an SVG", _CONVERT),
    (rb"8BPS", "is a Photoshop file", _CONVERT),
    (rb"\x89PNG|\xff\xd8|RIFF....WEBP|GIF8|BM|II\*\0|MM\0\*|\0\0\x01\0|P[1-6]\s", _DAMAGED, _RENEW),
    (rb"[^\0-\x08\x0e-\x1f]+$", "is a text file", "give the path of the image"),
    (rb"", "is in no format that is read here", _CONVERT),
]
_sizes: dict[str, tuple[int, int]] = {}  # of the images that were decoded, by digest


@dataclass(frozen=True)
class Picture:
    """An image that can be decoded; two of equal encoded bytes have equal digests.

    Attributes:
        digest: 14 hex digits (56 bits) of the sha256 of the encoded bytes. size: (width, height), upright.
        content: the file's absolute path, or the encoded bytes if it came from none. name: what errors call it.
    """

    digest: str
    size: tuple[int, int]
    content: bytes | Path = field(repr=False)
    name: str

    def open(self) -> Image.Image:
        """The first frame, upright, mode RGB, without metadata; transparent parts are white."""
        return _decode(self.encoded(), self.name)

    def encoded(self) -> bytes:
        """The file's bytes; raises DataError if they are no longer those of `digest`."""
        data = self.content if isinstance(self.content, bytes) else _read_file(self.content)
        if hashlib.sha256(data).hexdigest()[:14] != self.digest:
            raise DataError(f"{self.name} has changed since it was read; start the run again")
        return data


def read_picture(value: Any, folder: Path | None) -> Picture:
    """The image that a data row holds, decoded once to be sure.

    Args:
        value: a path (str, Path, file://), a data URI, encoded bytes, a dict of `datasets` with "bytes" or "path", or a
            PIL image, which is encoded as PNG.
        folder: where relative paths begin, the data file's; None is the working folder.
    Raises:
        DataError: nothing that can be read, more than 89 megapixels, or a side over 200 times the other. The text names
            the file and the fix; the row is for the caller to add.
    """
    name = None
    if isinstance(value, dict):
        name = value.get("path")
        value = name if value.get("bytes") is None else value["bytes"]
    if isinstance(value, Image.Image):
        name, buffer = f"the PIL image ({value.mode}, {value.width} x {value.height})", io.BytesIO()
        with _explained(name):
            _upright(value, name).save(buffer, "PNG", compress_level=1)
        value = buffer.getvalue()
    if isinstance(value, str) and value[:5].lower() == "data:":
        name = f"the data URI {excerpt(value, 50)}"
        try:
            value = base64.b64decode("".join(value.partition(",")[2].split()), validate=True)
        except ValueError as error:
            raise DataError(f"{name} has broken base64 ({error}); encode the bytes of the image file again") from error
    if isinstance(value, bytes):
        return _picture(value, value, str(name or f"the image of {len(value):,} bytes"))
    if not value or not isinstance(value, str | Path):
        raise DataError(f"{excerpt(value)} is no image; give a path, a data URI, encoded bytes or a PIL image")
    return _read_path(value, folder)


def thumbnail(picture: Picture, side: int = 96) -> str:
    """A JPEG of at most `side` pixels on the longer side, as a data URI for pages."""
    image, buffer = picture.open(), io.BytesIO()
    image.thumbnail((side, side))
    image.save(buffer, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _read_path(value: str | Path, folder: Path | None) -> Picture:
    text = str(value).removeprefix("file://")
    if re.match(r"\w+://", text):
        raise DataError(f"{excerpt(text)} is a URL; nothing is downloaded: save it next to the data and give its path")
    path = ((folder or Path()) / os.path.expanduser(text)).absolute()
    if os.path.isdir(path):
        raise DataError(f"{path} is a folder; give the path of an image in it")
    if not os.path.isfile(path):
        if re.match(r"/9j/|iVBORw0KGgo|R0lGOD|UklGR", text):  # JPEG, PNG, GIF, WEBP
            raise DataError(f"{excerpt(text, 50)} is no path but base64; write data:image/png;base64, in front of it")
        begin = f"a relative path begins in {folder or Path.cwd()}"
        raise DataError(f"there is no file {excerpt(text)}; looked for as {path} ({begin}); correct the path")
    return _picture(_read_file(path), path, str(path))


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); check the file and its permissions") from error


def _picture(data: bytes, content: bytes | Path, name: str) -> Picture:
    digest = hashlib.sha256(data).hexdigest()[:14]
    if digest not in _sizes:
        _sizes[digest] = _decode(data, name).size
        if len(_sizes) > 100_000:
            _sizes.pop(next(iter(_sizes)))
    return Picture(digest, _sizes[digest], content, name)


@contextmanager
def _explained(name: str, data: bytes = b"") -> Iterator[None]:
    """Pillow's errors as a DataError about `name`, and none of its warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of corrupt EXIF, and of many pixels, which are counted here
            yield
    except (DataError, MemoryError):
        raise
    except Image.DecompressionBombError as error:  # over twice the limit, before the size can be asked for
        raise DataError(f"{name} has {int(re.findall('[0-9]+', str(error))[0]):,} pixels, {_TOO_MANY}") from error
    except UnidentifiedImageError:
        head = data[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
        kind = next(f"{what}; {fix}" for start, what, fix in _KINDS if re.match(start, head, re.DOTALL))
        raise DataError(f"{name} {kind}") from None
    except Exception as error:  # of nearly any type if the file is broken: SyntaxError, struct.error, OverflowError
        raise DataError(f"{name} is truncated or damaged ({describe_error(error)}); {_REPLACE}") from error


def _decode(data: bytes, name: str) -> Image.Image:
    with _explained(name, data), Image.open(io.BytesIO(data), formats=FORMATS) as image:
        upright = _upright(image, name)
        Image.open(io.BytesIO(data), formats=FORMATS).verify()  # the checksums of a PNG's pixels, which load() skips
        return upright


def _upright(image: Image.Image, name: str) -> Image.Image:
    """The current frame, upright, RGB, over white. EXIF that cannot be read turns nothing, as in viewers. None is kept:
    `exif_transpose` fails to write some of it, and transformers' `load_image` would turn the image a second time."""
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise DataError(f"{name} has {width:,} x {height:,} pixels, {_TOO_MANY}")
    if max(image.size) > MOST_ASPECT * min(image.size) or not width:
        raise DataError(f"{name} has {width:,} x {height:,} pixels, a ratio over {MOST_ASPECT}; crop or pad it")
    image.load()
    orientation = None
    with suppress(Exception):
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _to_8_bits(image)
    elif image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image = image.convert("RGB")
    image.info = {}
    image.getexif()[ExifTags.Base.Orientation] = orientation
    return ImageOps.exif_transpose(image)


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Greyscale of more than 8 bits, scaled from 0..65535; "I" and "F", whose range no file states, from the first of
    0..1, 0..255, 0..65535 and lowest..highest that holds all values. Pillow's own conversion clips."""
    low, high = 0.0, 65535.0
    if image.mode in ("I", "F"):
        extrema: Any = image.getextrema()
        high = next((top for top in (1, 255, 65535) if extrema[0] >= 0 and extrema[1] <= top), 0)
        low, high = (0, high) if high else extrema
    scale = 255 / ((high - low) or 1)
    return image.convert("F").point(lambda value: value * scale + (0.5 - low * scale)).convert("L")
