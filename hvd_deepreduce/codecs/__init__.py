"""The codecs, one file each, by what they do: select elements, code indices, code values, or code both together."""
