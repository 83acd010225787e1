"""Sphinx's settings for the site."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

project = "RL post-training"
extensions = ["myst_parser", "sphinx.ext.linkcode", "sphinx_copybutton", "tooling.docs_site.extension"]
exclude_patterns = ["names.json"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!rl_(core|rollout|distill|metrics)\b).*")]
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 88

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
myst_url_schemes = ["http", "https", "mailto", "source"]

html_theme = "pydata_sphinx_theme"
html_title = project
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # it fetches pages, which browsers refuse for file URLs
html_theme_options = {
    "logo": {"text": project},
    "header_links_before_dropdown": 6,
    "navbar_persistent": [],
    "navbar_end": ["search-button-field", "theme-switcher"],
    "footer_start": [],
    "footer_end": [],
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_context = {"default_mode": "auto"}


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """Return the source of a documented name, which extension.py turns into a URL."""
    return f"source:{info['module']}.{info['fullname']}" if domain == "py" else None
