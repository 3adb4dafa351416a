//! The lexer: splits CEL source into tokens.

use super::ast::{Literal, Offset};
use super::parse::SyntaxError;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token {
    Literal(Literal),
    Word(String),
    Symbol(&'static str),
    End,
}

const SYMBOLS: [&str; 27] = [
    "&&", "||", "==", "!=", "<=", ">=", "[?", ".?", "{", "}", "(", ")", "[", "]", ".", ",", ":",
    "?", "+", "-", "*", "/", "%", "!", "<", ">", "=",
];

pub(super) fn tokens(source: &str) -> Result<Vec<(Offset, Token)>, SyntaxError> {
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < source.len() {
        let rest = &source[at..];
        let first = rest.as_bytes()[0];
        if first.is_ascii_whitespace() {
            at += 1;
        } else if rest.starts_with("//") {
            at += rest.find('\n').unwrap_or(rest.len());
        } else if let Some((token, width)) = string(rest, at)? {
            tokens.push((at, token));
            at += width;
        } else if first.is_ascii_digit()
            || (first == b'.' && rest[1..].starts_with(|c: char| c.is_ascii_digit()))
        {
            let (token, width) = number(rest, at)?;
            tokens.push((at, token));
            at += width;
        } else if first.is_ascii_alphabetic() || first == b'_' {
            let width = rest
                .find(|c: char| !c.is_ascii_alphanumeric() && c != '_')
                .unwrap_or(rest.len());
            tokens.push((at, word(&rest[..width])));
            at += width;
        } else if let Some(inner) = rest.strip_prefix('`') {
            let width = inner
                .find('`')
                .ok_or_else(|| SyntaxError::new(at, "unterminated identifier"))?;
            tokens.push((at, Token::Word(inner[..width].to_owned())));
            at += width + 2;
        } else if let Some(symbol) = SYMBOLS.iter().find(|symbol| rest.starts_with(**symbol)) {
            tokens.push((at, Token::Symbol(symbol)));
            at += symbol.len();
        } else {
            let character = rest.chars().next().unwrap_or_default();
            return Err(SyntaxError::new(
                at,
                format!("token recognition error at: '{character}'"),
            ));
        }
    }
    tokens.push((source.len(), Token::End));
    Ok(tokens)
}

fn word(text: &str) -> Token {
    match text {
        "true" => Token::Literal(Literal::Bool(true)),
        "false" => Token::Literal(Literal::Bool(false)),
        "null" => Token::Literal(Literal::Null),
        "in" => Token::Symbol("in"),
        other => Token::Word(other.to_owned()),
    }
}

fn number(text: &str, at: Offset) -> Result<(Token, usize), SyntaxError> {
    let invalid = || SyntaxError::new(at, "invalid number");
    if let Some(hex) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        let width = hex
            .find(|c: char| !c.is_ascii_hexdigit())
            .unwrap_or(hex.len());
        let digits = &hex[..width];
        if hex[width..].starts_with(['u', 'U']) {
            let value = u64::from_str_radix(digits, 16).map_err(|_| invalid())?;
            return Ok((Token::Literal(Literal::Uint(value)), width + 3));
        }
        let value = i64::from_str_radix(digits, 16).map_err(|_| invalid())?;
        return Ok((Token::Literal(Literal::Int(value)), width + 2));
    }
    let digits = |text: &str| {
        text.find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len())
    };
    let mut width = digits(text);
    let mut is_float = false;
    if text[width..].starts_with('.') && digits(&text[width + 1..]) > 0 {
        is_float = true;
        width += 1 + digits(&text[width + 1..]);
    }
    if let Some(exponent) = text[width..].strip_prefix(['e', 'E']) {
        let sign = usize::from(exponent.starts_with(['+', '-']));
        let length = digits(&exponent[sign..]);
        if length > 0 {
            is_float = true;
            width += 1 + sign + length;
        }
    }
    let spelled = &text[..width];
    if is_float {
        let value = spelled.parse().map_err(|_| invalid())?;
        return Ok((Token::Literal(Literal::Double(value)), width));
    }
    if text[width..].starts_with(['u', 'U']) {
        let value = spelled.parse().map_err(|_| invalid())?;
        return Ok((Token::Literal(Literal::Uint(value)), width + 1));
    }
    // 9223372036854775808 is valid only after a minus sign; the parser handles that.
    let value = match spelled.parse::<u64>() {
        Ok(value) if value == i64::MIN.unsigned_abs() => i64::MIN,
        Ok(value) => i64::try_from(value).map_err(|_| invalid())?,
        Err(_) => return Err(invalid()),
    };
    Ok((Token::Literal(Literal::Int(value)), width))
}

/// A string or bytes literal at the start of `text`, if there is one.
fn string(text: &str, at: Offset) -> Result<Option<(Token, usize)>, SyntaxError> {
    let mut opening = text.bytes().take(3);
    let Some(prefix) = opening.position(|byte| byte == b'"' || byte == b'\'') else {
        return Ok(None);
    };
    if !text[..prefix].bytes().all(|byte| b"rRbB".contains(&byte)) {
        return Ok(None);
    }
    let raw = text[..prefix].contains(['r', 'R']);
    let bytes = text[..prefix].contains(['b', 'B']);
    let body = &text[prefix..];
    let quote = &body[..1];
    let triple = quote.repeat(3);
    let delimiter = if body.starts_with(&triple) {
        triple.as_str()
    } else {
        quote
    };
    let inner = &body[delimiter.len()..];
    let mut end = 0;
    loop {
        let rest = &inner[end..];
        if rest.starts_with(delimiter) {
            break;
        }
        let mut characters = rest.chars();
        match characters.next() {
            None => return Err(SyntaxError::new(at, "unterminated string")),
            Some('\n' | '\r') if delimiter.len() == 1 => {
                return Err(SyntaxError::new(at, "unterminated string"));
            }
            Some('\\') if !raw => end += 1 + characters.next().map_or(0, char::len_utf8),
            Some(character) => end += character.len_utf8(),
        }
    }
    let content = &inner[..end];
    let width = prefix + delimiter.len() * 2 + end;
    let literal = if bytes {
        let value = if raw {
            content.as_bytes().to_vec()
        } else {
            unescape_bytes(content, at)?
        };
        Literal::Bytes(value)
    } else if raw {
        Literal::String(content.to_owned())
    } else {
        Literal::String(unescape(content, at)?)
    };
    Ok(Some((Token::Literal(literal), width)))
}

fn simple_escape(character: char) -> Option<char> {
    Some(match character {
        'a' => '\u{7}',
        'b' => '\u{8}',
        'f' => '\u{c}',
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        'v' => '\u{b}',
        '\\' | '\'' | '"' | '`' | '?' => character,
        _ => return None,
    })
}

/// The code of an escape (`\x`, `\u`, `\U` or octal), and the number of characters after the first.
fn code(kind: char, rest: &str) -> Option<(u32, usize)> {
    let (width, radix, skip) = match kind {
        'x' | 'X' => (2, 16, 0),
        'u' => (4, 16, 0),
        'U' => (8, 16, 0),
        '0'..='3' => (2, 8, 1),
        _ => return None,
    };
    let digits = rest.get(..width)?;
    let spelled = if skip == 1 {
        format!("{kind}{digits}")
    } else {
        digits.to_owned()
    };
    u32::from_str_radix(&spelled, radix)
        .ok()
        .map(|value| (value, width))
}

fn unescape(content: &str, at: Offset) -> Result<String, SyntaxError> {
    let bad = || SyntaxError::new(at, "invalid escape sequence");
    let mut value = String::with_capacity(content.len());
    let mut rest = content;
    while let Some(slash) = rest.find('\\') {
        value.push_str(&rest[..slash]);
        let kind = rest[slash + 1..].chars().next().ok_or_else(bad)?;
        rest = &rest[slash + 1 + kind.len_utf8()..];
        if let Some(character) = simple_escape(kind) {
            value.push(character);
        } else {
            let (number, width) = code(kind, rest).ok_or_else(bad)?;
            value.push(char::from_u32(number).ok_or_else(bad)?);
            rest = &rest[width..];
        }
    }
    value.push_str(rest);
    Ok(value)
}

fn unescape_bytes(content: &str, at: Offset) -> Result<Vec<u8>, SyntaxError> {
    let bad = || SyntaxError::new(at, "invalid escape sequence");
    let mut value = Vec::with_capacity(content.len());
    let mut rest = content;
    while let Some(slash) = rest.find('\\') {
        value.extend_from_slice(&rest.as_bytes()[..slash]);
        let kind = rest[slash + 1..].chars().next().ok_or_else(bad)?;
        rest = &rest[slash + 1 + kind.len_utf8()..];
        if let Some(character) = simple_escape(kind) {
            value.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
        } else {
            let (number, width) = code(kind, rest).ok_or_else(bad)?;
            value.push(u8::try_from(number).map_err(|_| bad())?);
            rest = &rest[width..];
        }
    }
    value.extend_from_slice(rest.as_bytes());
    Ok(value)
}
