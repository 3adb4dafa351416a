//! Static checks of an expression: all names are declared, and all selected fields exist in the schema.

use super::ast::{Comprehension, Expr, Macro, Node};
use super::eval::TYPES;
use super::functions;
use super::parse::SyntaxError;
use crate::schema::Node as Schema;

/// The statically known type of a value.
#[derive(Clone, Copy)]
enum Known<'a> {
    Nothing,
    Schema(&'a Schema),
}

struct Names<'n, 'a> {
    parent: Option<&'n Names<'n, 'a>>,
    name: &'n str,
    known: Known<'a>,
}

impl<'a> Names<'_, 'a> {
    fn find(&self, name: &str) -> Option<Known<'a>> {
        if self.name == name {
            Some(self.known)
        } else {
            self.parent?.find(name)
        }
    }
}

/// The result of the static checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Facts {
    pub uses_old_self: bool,
}

/// Checks an expression with `self` and `oldSelf` of the given schema.
pub(super) fn check(
    expr: &Expr,
    schema: &Schema,
    is_root: bool,
    optional_old_self: bool,
) -> Result<Facts, SyntaxError> {
    let self_known = Known::Schema(schema);
    let old_known = if optional_old_self {
        Known::Nothing
    } else {
        self_known
    };
    let names = Names {
        parent: None,
        name: "self",
        known: self_known,
    };
    let names = Names {
        parent: Some(&names),
        name: "oldSelf",
        known: old_known,
    };
    let mut checker = Checker {
        uses_old_self: false,
        root: is_root.then_some(schema),
    };
    checker.visit(expr, &names)?;
    Ok(Facts {
        uses_old_self: checker.uses_old_self,
    })
}

struct Checker<'a> {
    uses_old_self: bool,
    /// The schema of the resource itself, whose metadata is described implicitly.
    root: Option<&'a Schema>,
}

impl<'a> Checker<'a> {
    fn visit(&mut self, expr: &Expr, names: &Names<'_, 'a>) -> Result<Known<'a>, SyntaxError> {
        match &expr.node {
            Node::Literal(_) => {}
            Node::Ident(name) => {
                self.uses_old_self |= name == "oldSelf";
                if let Some(known) = names.find(name) {
                    return Ok(known);
                }
                if !TYPES.contains(&name.as_str()) {
                    return Err(undeclared(expr.at, name));
                }
            }
            Node::Select {
                operand,
                field,
                optional,
            } => {
                let known = self.visit(operand, names)?;
                let known = self.field(expr.at, known, &field.written, &field.property)?;
                return Ok(if *optional { Known::Nothing } else { known });
            }
            Node::Has { operand, field } => {
                let known = self.visit(operand, names)?;
                self.field(expr.at, known, &field.written, &field.property)?;
            }
            Node::Index {
                operand,
                index,
                optional,
            } => {
                let known = self.visit(operand, names)?;
                self.visit(index, names)?;
                if let (Known::Schema(schema), false) = (known, *optional) {
                    return Ok(element(schema));
                }
            }
            Node::Call {
                function,
                target,
                arguments,
                ..
            } => {
                if !functions::is_known(function, target.is_some()) {
                    return Err(undeclared(expr.at, function));
                }
                for part in target.as_deref().into_iter().chain(arguments) {
                    self.visit(part, names)?;
                }
            }
            Node::List(items) => {
                for (item, _) in items {
                    self.visit(item, names)?;
                }
            }
            Node::Map(entries) => {
                for (key, value, _) in entries {
                    self.visit(key, names)?;
                    self.visit(value, names)?;
                }
            }
            Node::Not(operand) | Node::Negate(operand) => {
                self.visit(operand, names)?;
            }
            Node::Binary(_, left, right) => {
                self.visit(left, names)?;
                self.visit(right, names)?;
            }
            Node::And(terms) | Node::Or(terms) => {
                for term in terms {
                    self.visit(term, names)?;
                }
            }
            Node::Conditional(parts) => {
                for part in parts.iter() {
                    self.visit(part, names)?;
                }
            }
            Node::Comprehension(comprehension) => return self.comprehension(comprehension, names),
            Node::Bind {
                variable,
                value,
                body,
            } => {
                let known = self.visit(value, names)?;
                return self.visit(
                    body,
                    &Names {
                        parent: Some(names),
                        name: variable,
                        known,
                    },
                );
            }
        }
        Ok(Known::Nothing)
    }

    fn comprehension(
        &mut self,
        comprehension: &Comprehension,
        names: &Names<'_, 'a>,
    ) -> Result<Known<'a>, SyntaxError> {
        let range = self.visit(&comprehension.range, names)?;
        let (first, second) = match (range, &comprehension.second) {
            (Known::Schema(schema), None) if schema.items.is_some() => {
                (element(schema), Known::Nothing)
            }
            (Known::Schema(schema), Some(_)) => (Known::Nothing, element(schema)),
            _ => (Known::Nothing, Known::Nothing),
        };
        let inner = Names {
            parent: Some(names),
            name: &comprehension.variable,
            known: first,
        };
        let innermost = comprehension.second.as_deref().map(|name| Names {
            parent: Some(&inner),
            name,
            known: second,
        });
        let scope = innermost.as_ref().unwrap_or(&inner);
        if let Some(filter) = &comprehension.filter {
            self.visit(filter, scope)?;
        }
        self.visit(&comprehension.body, scope)?;
        // A filtered list has the same element type as its range.
        let keeps_elements = matches!(comprehension.kind, Macro::Filter | Macro::SortBy);
        Ok(if keeps_elements {
            range
        } else {
            Known::Nothing
        })
    }

    fn field(
        &self,
        at: usize,
        known: Known<'a>,
        written: &str,
        property: &str,
    ) -> Result<Known<'a>, SyntaxError> {
        let Known::Schema(schema) = known else {
            return Ok(Known::Nothing);
        };
        if let Some(child) = schema.properties.get(property) {
            return Ok(Known::Schema(child));
        }
        if let Some(child) = schema.additional_schema() {
            return Ok(Known::Schema(child));
        }
        let implicit =
            self.root.is_some_and(|root| std::ptr::eq(root, schema)) || schema.embedded_resource;
        let free = schema.preserve_unknown || schema.additional.is_some() || schema.int_or_string;
        if free || (implicit && ["apiVersion", "kind", "metadata"].contains(&property)) {
            return Ok(Known::Nothing);
        }
        // The metadata of a resource is declared as `type: object`, but still has a name and a generateName.
        if ["name", "generateName"].contains(&property) && schema.properties.is_empty() {
            return Ok(Known::Nothing);
        }
        Err(SyntaxError::new(at, format!("undefined field '{written}'")))
    }
}

fn element(schema: &Schema) -> Known<'_> {
    let child = schema
        .items
        .as_deref()
        .or_else(|| schema.additional_schema());
    child.map_or(Known::Nothing, Known::Schema)
}

fn undeclared(at: usize, name: &str) -> SyntaxError {
    SyntaxError::new(
        at,
        format!("undeclared reference to '{name}' (in container '')"),
    )
}
